"""The directory of each `zmqtrain run`, for the Unix sockets of its ps, or of a task on Ray.

Its process holds a lock on it, so an unlocked one belongs to a process that was killed.
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

from zmqtrain.store.segment_files import SegmentFile, file_name, remove_dead, segment_files

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
    with contextlib.ExitStack() as stack:
        while (path := _made(stack)) is None:
            pass  # another run looks at it, or has taken it for that of a dead one
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


def _made(stack: contextlib.ExitStack) -> Path | None:
    """Return a new directory that is locked, None if another process was faster."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        stack.enter_context(_locked(path))
    except (BlockingIOError, FileNotFoundError):
        shutil.rmtree(path, ignore_errors=True)
        return None
    return path if path.exists() else None


def ps_address(directory: Path, index: int) -> str:
    """Return the address of a ps of the run with this directory."""
    return f"ipc://{directory}/ps-{index}.sock"


def remove_dead_runs(segments: Path | None) -> None:
    """Remove the directories of killed runs of this user, and the memory of their ps.

    Their ps cannot come back, since their addresses were in the directory. A directory stays while
    a process still maps that memory. ``segments``: the directory of the memory, if there is one.
    """
    left = list(segment_files(segments)) if segments is not None else []
    for run in run_directories(Path(tempfile.gettempdir())):
        if not run.in_use:
            own = [segment.path for segment in left if _is_of(segment, run.path)]
            removed = [remove_dead(path) for path in own]
            if all(removed):
                remove_run(run.path)


def _is_of(segment: SegmentFile, directory: Path) -> bool:
    return segment.path.name == file_name(
        f"ps {segment.index}", ps_address(directory, segment.index)
    )


def run_directories(temporary: Path) -> Iterator[RunDirectory]:
    """Yield the run directories of this user; skip any that vanish meanwhile."""
    for path in sorted(temporary.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.getuid() or path.is_symlink():
                continue
            nbytes = sum(entry.lstat().st_size for entry in path.iterdir())
            yield RunDirectory(path, nbytes, found.st_mtime, not _is_free(path))


def remove_run(path: Path) -> bool:
    """Remove a run's directory, unless it is in use; return whether it was removed."""
    with contextlib.suppress(OSError), _locked(path):
        shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _is_free(path: Path) -> bool:
    try:
        with _locked(path, fcntl.LOCK_SH):  # two processes that check must not see each other
            return True
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock on a directory.

    Raises:
        OSError: another process holds it, or there is no such directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
