"""Flushing, digesting and deleting the files of a run, with errors that name the file."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from zmqtrain.errors import CheckpointError
from zmqtrain.files import open_file

_WRITABLE = "a writable directory with free space; earlier checkpoints are untouched"
_READABLE = "a part of a complete checkpoint; bring it back, or resume from another one"
_DELETABLE = "to own it; delete it by hand, newer ones are untouched"


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
def _explaining(what: Path, failure: str, expected: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what}: cannot be {failure}: {error}; expected {expected}"
        ) from error


def writing(what: Path) -> AbstractContextManager[None]:
    """Turn an OSError into a CheckpointError that names ``what`` was being written."""
    return _explaining(what, "written", _WRITABLE)


def reading(what: Path) -> AbstractContextManager[None]:
    """Turn an OSError into a CheckpointError that names ``what`` was being read."""
    return _explaining(what, "read", _READABLE)


def deleting(what: Path) -> AbstractContextManager[None]:
    """Turn an OSError into a CheckpointError that names ``what`` was being deleted."""
    return _explaining(what, "deleted", _DELETABLE)
