"""The files of segments, and which of them are no longer needed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.store import locks

SHARED_MEMORY = Path("/dev/shm")
SUFFIX = ".segment"

_NAME = re.compile(rf"ps-\d+-[0-9a-f]{{16}}{re.escape(SUFFIX)}")


def can_be_shared() -> bool:
    """Return whether this system has the calls that segments in files need; macOS does not."""
    return hasattr(fcntl, "F_OFD_SETLK") and hasattr(os, "posix_fallocate")


def default_directory() -> Path | None:
    """Return the user's directory for segments in shared memory; None where there is none."""
    if not can_be_shared() or not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return None
    return SHARED_MEMORY / f"zmqtrain-{os.geteuid()}"


def file_name(task: str, address: str) -> str:
    """Return the name of a ps's segment: the same for every life of a ps at this address."""
    digest = hashlib.blake2b(address.encode(), digest_size=8).hexdigest()
    return f"{task.replace(' ', '-')}-{digest}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment found on this host."""

    path: Path
    nbytes: int
    modified_at: float  # Unix time
    owned: bool  # its ps is alive
    held: bool  # a worker of it is, and waits for the next life of a ps that is dead

    @property
    def index(self) -> int:
        return int(self.path.name.split("-")[1])


def segment_files(directory: Path) -> Iterator[SegmentFile]:
    """Yield this user's segments in a directory; those that vanish meanwhile are passed over."""
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            found = path.lstat()
            if _is_segment(path, found):
                owned, held = locks.owned_and_held(path)
                tables = [file.stat() for file in tables_directory(path).glob("*")]
                nbytes = 512 * sum(each.st_blocks for each in (found, *tables))
                yield SegmentFile(path, nbytes, found.st_mtime, owned, held)
        except FileNotFoundError:
            continue


def tables_directory(path: Path) -> Path:
    """Return the directory of the tables that belong to the segment at ``path``."""
    return path.with_name(f"{path.name}.tables")


def remove_files(path: Path) -> None:
    """Remove the segment at ``path``, if there is one, and its tables."""
    path.unlink(missing_ok=True)
    shutil.rmtree(tables_directory(path), ignore_errors=True)


def remove_dead(path: Path) -> bool:
    """Remove the segment at ``path``, and its tables, if its ps and their workers are dead.

    Returns whether it was removed.

    A file that this user may not remove, or cannot reach, stays.

    The lock by which a ps owns its segment is held meanwhile: none can begin to own this one, and
    none finds it without an owner, so as to put its own in its place.
    """
    with ExitStack() as closing, suppress(OSError):  # as a rule BlockingIOError: its ps is alive
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        closing.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        # Before the lock was ours, another ps may have put its own segment here.
        is_same = _is_segment(path, found) and os.path.samestat(found, path.lstat())
        if is_same and not locks.is_held(descriptor):
            remove_files(path)
            return True
    return False


def _is_segment(path: Path, found: os.stat_result) -> bool:
    """Return whether a file is a segment of ours; an empty one is being made, not locked yet."""
    return (
        _NAME.fullmatch(path.name) is not None
        and stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and found.st_size > 0
    )
