"""The directory of each `zmqtrain run`, for the Unix sockets of its ps.

A run holds a lock on its directory, so an unlocked one belongs to a run that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "zmqtrain-run-"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a `zmqtrain run`; left over if it is not in use."""

    path: Path
    nbytes: int
    modified_at: float  # Unix time
    in_use: bool


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """Make a private directory, and remove it at the end of the block."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with _locked(path):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_directories(temporary: Path) -> Iterator[RunDirectory]:
    """Yield those of this user; skip any that vanish meanwhile."""
    for path in sorted(temporary.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.getuid() or path.is_symlink():
                continue
            nbytes = sum(entry.lstat().st_size for entry in path.iterdir())
            yield RunDirectory(path, nbytes, found.st_mtime, not _is_free(path))


def remove_run(path: Path) -> bool:
    """Remove a run's directory, unless it is in use; return whether it was removed."""
    if not _is_free(path):
        return False
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _is_free(path: Path) -> bool:
    try:
        with _locked(path):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock on a directory.

    Raises:
        OSError: another process holds it, or there is no such directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
