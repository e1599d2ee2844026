"""Where segments lie as files, and which of them nobody needs any more."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.store.segment import is_owned

SHARED_MEMORY = Path("/dev/shm")
SUFFIX = ".segment"


def default_directory() -> Path | None:
    """Return the user's directory for segments in shared memory; None where there is none."""
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
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


def segment_files(directory: Path) -> Iterator[SegmentFile]:
    """Yield the segments in a directory; those that vanish meanwhile are passed over."""
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            found = path.stat()
            yield SegmentFile(path, 512 * found.st_blocks, found.st_mtime, is_owned(path))
        except FileNotFoundError:
            continue
