"""Flushing, digesting and deleting the files of a run, with errors that name the file."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from zmqtrain.errors import CheckpointError
from zmqtrain.files import open_file


def new_token() -> str:
    """Return 8 hexadecimal digits that no other attempt shares."""
    return secrets.token_hex(4)


def sync_path(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_bytes(content: bytes) -> str:
    """Return the 256-bit BLAKE2b of ``content`` as 64 hexadecimal digits (``b2sum -l 256``)."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def digest_file(path: Path) -> str:
    """Return the 256-bit BLAKE2b of a file as 64 hexadecimal digits (``b2sum -l 256``)."""
    with open(open_file(path), "rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def discard(path: Path) -> None:
    """Delete a directory so that a crash in between cannot leave half of it under its name."""
    trash = path.with_name(f"{path.name}.trash-{new_token()}")
    os.rename(path, trash)
    shutil.rmtree(trash)


@contextmanager
def _explaining(failure: str, expected: str, what: Path) -> Iterator[None]:
    """Turn an OSError of the block, which works on ``what``, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what}: cannot be {failure}: {error}; expected {expected}"
        ) from error


writing = partial(
    _explaining,
    "written",
    "a writable directory with free space; earlier checkpoints are untouched",
)
reading = partial(
    _explaining,
    "read",
    "a part of a complete checkpoint; bring it back, or resume from another one",
)
deleting = partial(_explaining, "deleted", "to own it; delete it by hand, newer ones are untouched")
"""Blocks that write, read or delete a file: see :func:`_explaining`."""
