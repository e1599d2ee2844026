"""Files of a data set: their names, and files that several tasks make together."""

from __future__ import annotations

import fcntl
import glob
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from zmqtrain.errors import DataError
from zmqtrain.hints import explaining

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a pattern such as ``train-*.csv``, or several of them."""


class Files:
    """A data set in files; ``paths``: a file, a pattern, or a list of them."""

    paths: Paths

    @property
    def source_files(self) -> list[Path]:
        """The files, in their order."""
        return files_of(self.paths)


def files_of(paths: Paths) -> list[Path]:
    """Return the files: those of a pattern sorted by name, patterns in the given order.

    Raises:
        DataError: there is no such file.
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        text = os.fspath(path)
        if "://" in text:
            raise DataError(
                f"{text} is an address; expected files of this host; copy them to it, or read them "
                "by Stream([address, ...], read), whose function read may use fsspec"
            )
        names = (
            [text] if os.path.exists(text) else sorted(glob.glob(_pattern(text), recursive=True))
        )
        if not names:
            brackets = "; in a pattern, [[] stands for a bracket" if "[" in text else ""
            raise DataError(
                f"no file {text} is in {Path.cwd()}; expected a file or a pattern such as "
                f"data/train-*; correct the path, or copy the files to this host{brackets}"
            )
        found += map(Path, names)
    return found


def _pattern(text: str) -> str:
    """Return the pattern with existing directories escaped."""
    there = next((parent for parent in Path(text).parents if parent.exists()), None)
    return (
        text
        if there is None
        else os.path.join(glob.escape(str(there)), Path(text).relative_to(there))
    )


DAMAGED = (
    *(OSError, ValueError, EOFError, LookupError, TypeError, NotImplementedError, MemoryError),
    *(zlib.error, zipfile.BadZipFile),
)
"""Errors of readers for missing or damaged files."""


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Name the file in errors of reading it.

    Raises:
        DataError: the block raised an error of a file or of its format.
    """
    try:
        yield
    except DAMAGED as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        advice = "a whole file; write or download it again, or copy it to this host"
        if "is a directory" in reason.lower():
            advice = f"a file, or a pattern of those in it: {path}/*{_ending(path)}"
        raise DataError(f"{path}: cannot be read ({reason}); expected {advice}") from error


def _ending(directory: object) -> str:
    """Return the most frequent ending of files in a directory."""
    paths = Path(str(directory)).iterdir()
    endings = [path.suffix for path in paths if path.name[0] not in "._"]
    return max(endings, key=endings.count, default="")


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    """Return size and time of change, which differ once a file has changed."""
    return status.st_size, status.st_mtime_ns


@contextmanager
def one_task_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock of a file to make, so that the tasks of a host make it once.

    Raises:
        DataError: its directory cannot be written to.
    """
    lock = path.with_name(f"{path.name}.lock")
    remedy = "expected a directory that this user can write to; give another one, with enough room"
    with explaining(f"{path} cannot be made", remedy, DataError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # In a directory that all may write to, another user may have put a link there.
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with its process
        yield
    finally:
        os.close(file)
