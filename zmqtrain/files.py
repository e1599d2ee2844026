"""Files: only regular ones of a bounded size are read, and written files are on the disk.

A directory may be open to others: a FIFO would block the reader forever, a device never end.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zmqtrain.units import data_size

SMALL_NBYTES = 16 << 20
"""Largest note, key file or record that is read."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class IrregularFileError(OSError):
    """A file is not a regular one, or too large."""


def open_file(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Return a descriptor of a regular file, without waiting for another process to open it.

    Raises:
        IrregularFileError: it is a FIFO, a device, a directory or a socket.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        _check_kind(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: Path, most_nbytes: int = SMALL_NBYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        IrregularFileError: it is not regular, or larger than ``most_nbytes``.
        OSError: it cannot be read.
    """
    with open(open_file(path), "rb") as file:
        content = file.read(most_nbytes + 1)
        if len(content) > most_nbytes:
            nbytes = max(os.fstat(file.fileno()).st_size, len(content))
            raise _irregular(
                path, f"it has {data_size(nbytes)}, expected at most {data_size(most_nbytes)}"
            )
        return content


def write_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Create ``path`` with this content and flush it to the disk."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the content of ``path``, or leave it unchanged."""
    with replaced(path) as temporary:
        write_file(temporary, content, mode)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a path beside this one, whose file replaces this one if the block succeeds."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def check_regular(path: Path) -> int:
    """Check a file that a library opens by its path; return its size in bytes.

    Raises:
        IrregularFileError: it is not regular.
        OSError: it is not there.
    """
    found = path.stat()
    _check_kind(path, found)
    return found.st_size


def _check_kind(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise _irregular(path, f"it is {kind}, expected a regular file")


def _irregular(path: Path, text: str) -> IrregularFileError:
    return IrregularFileError(errno.EINVAL, text, str(path))
