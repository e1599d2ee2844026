"""TFRecord files: records one behind another, each with checksums.

A record is its length (uint64), the masked crc32c of these 8 bytes, the data, and the masked crc32c
of the data, all little-endian. See tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

import glob
import hashlib
import io
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.files import DAMAGED, Files, Paths, one_task_at_a_time, reading, stamp_of
from zmqtrain.data.subset import stacked
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.files import replace_file, replaced
from zmqtrain.hints import imported
from zmqtrain.models.base import Array, Batch
from zmqtrain.user_code import user_code

log = logging.getLogger(__name__)

HEADER, FOOTER = struct.Struct("<QI"), struct.Struct("<I")
AUTO = 32 + zlib.MAX_WBITS  # zlib's or gzip's format, as the first bytes say
MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class TFRecord(Files):
    """Examples in TFRecord files, which may be compressed as GZIP or ZLIB.

    ``paths``: a file, a pattern such as ``data/train-*``, or a list of them. ``parse(record)`` gets
    the bytes of a record and returns an example: a tuple of arrays and numbers, or a single one;
    :func:`zmqtrain.data.parse_example` decodes TensorFlow's ``Example``.

    A file is indexed once. The index, and the content of a compressed file, is kept beside the
    file, or in the directory ``cache``. ``on_error``: "stop" when a checksum is wrong, or "skip"
    that record: then indexing reads all records, and every task skips the same ones.
    """

    paths: Paths
    parse: Callable[[bytes], Any]
    on_error: Literal["stop", "skip"] = "stop"
    cache: str | Path | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("stop", "skip"):
            raise ConfigError(f"on_error is {self.on_error!r}; expected 'stop' or 'skip'")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, indices: Array) -> Batch:
        return stacked(map(self._example, np.asarray(indices).tolist()))

    @cached_property
    def _files(self) -> list[_Indexed]:
        cache = None if self.cache is None else Path(self.cache)
        return [_indexed(path, cache, self.on_error == "skip") for path in self.source_files]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The first record of each file, and the number of records."""
        return np.cumsum([0, *(len(file.spans) for file in self._files)])

    def _example(self, number: int) -> Any:
        place = int(np.searchsorted(self._starts, number, side="right")) - 1
        file, record = self._files[place], number - int(self._starts[place])
        data = file.read(record)
        with user_code("parse", self, DataError, lambda: f"It was record {record} of {file.name}"):
            return self.parse(data)


class _Indexed(NamedTuple):
    """A file whose records can be read by number."""

    name: str  # of the file that was given
    path: Path  # where its records lie uncompressed
    stamp: tuple[int, int]  # of that when it was indexed
    spans: NDArray[np.int64]  # (records, 2): place and length of the data

    def read(self, record: int) -> bytes:
        start, nbytes = self.spans[record].tolist()
        with reading(self.name):
            file = _opened(self.path, self.stamp)
            content = os.pread(file.descriptor, nbytes + FOOTER.size, start)
        data, footer = content[:nbytes], content[nbytes:]
        if len(footer) < FOOTER.size or FOOTER.unpack(footer)[0] != masked_crc(data):
            raise _damaged(self.name, record, start - HEADER.size, "its checksum is wrong")
        return data


class _Open:
    """A file that several threads read at places of their own."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@lru_cache(maxsize=64)
def _opened(path: Path, stamp: tuple[int, int]) -> _Open:
    file = _Open(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    if stamp_of(os.stat(file.descriptor)) != stamp:
        raise DataError(
            f"{path} has changed since it was indexed; data must not change during training; "
            "start the task again"
        )
    return file


def masked_crc(data: bytes) -> int:
    """Return the checksum of TFRecord files: crc32c, rotated by 15 bits, plus a constant.

    Raises:
        ConfigError: google-crc32c is not installed.
    """
    crc: int = imported("google_crc32c", "data").value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _indexed(source: Path, cache: Path | None, skip: bool) -> _Indexed:
    """Return a file with its index, which is made if it is missing."""
    name = f".{source.name}"
    if cache is not None:
        name = (
            f"{source.name}-{hashlib.blake2b(bytes(source.resolve()), digest_size=6).hexdigest()}"
        )
    directory = cache or source.parent
    index, copy = directory / f"{name}.index.npz", directory / f"{name}.records"
    with reading(source):
        is_plain = _is_plain(source)
        path = source if is_plain else copy
        if (found := _load(index, source, path, skip)) is not None:
            return found
        if cache is None and is_plain and not os.access(directory, os.W_OK):
            return _Indexed(str(source), path, stamp_of(path.stat()), _spans(source, path, skip))
        with one_task_at_a_time(index):
            if (found := _load(index, source, path, skip)) is not None:
                return found
            if not is_plain:
                _decompress(source, path)
            content = io.BytesIO()
            np.savez(content, key=_key(source, path, skip), spans=_spans(source, path, skip))
            replace_file(index, content.getvalue())
        found = _load(index, source, path, skip)
    if found is None:
        raise DataError(f"{source} changes while it is indexed; start again when it is whole")
    return found


def _load(index: Path, source: Path, path: Path, skip: bool) -> _Indexed | None:
    """Return the index if it exists and fits the file."""
    try:
        with index.open("rb") as file, np.load(file) as content:
            if np.array_equal(content["key"], _key(source, path, skip)):
                return _Indexed(str(source), path, stamp_of(path.stat()), content["spans"])
    except DAMAGED:
        pass  # it is made anew
    return None


def _key(source: Path, path: Path, skip: bool) -> NDArray[np.int64]:
    return np.array([*stamp_of(source.stat()), *stamp_of(path.stat()), skip], np.int64)


def _is_plain(path: Path) -> bool:
    """Return whether a file begins with a record or is empty, rather than compressed."""
    with path.open("rb") as file:
        first = file.read(HEADER.size)
    is_compressed = first[:2] == b"\x1f\x8b" or (
        len(first) > 1 and first[0] & 15 == 8 and int.from_bytes(first[:2]) % 31 == 0
    )
    return _length(first) is not None or not is_compressed


def _length(header: bytes) -> int | None:
    """Return the number of bytes that follow, None if the header is damaged."""
    if len(header) < HEADER.size:
        return None
    nbytes, crc = HEADER.unpack(header)
    return int(nbytes) if masked_crc(header[:8]) == crc else None


def _spans(source: Path, path: Path, skip: bool) -> NDArray[np.int64]:
    """Return place and length of each record's data; with ``skip``, only of whole records."""
    spans: list[tuple[int, int]] = []
    left_out: list[int] = []
    place, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while place < size:
            number = len(spans) + len(left_out)
            nbytes = _length(file.read(HEADER.size))
            if nbytes is None or place + HEADER.size + nbytes + FOOTER.size > size:
                reason = "its length is damaged" if nbytes is None else "it is cut short"
                if not skip:
                    raise _damaged(str(source), number, place, reason)
                log.warning("%s: record %d: %s; it and the %d bytes from it on are left out",
                            source, number, reason, size - place)  # fmt: skip
                break
            if skip and FOOTER.pack(masked_crc(file.read(nbytes))) != file.read(FOOTER.size):
                left_out.append(number)
            else:
                spans.append((place + HEADER.size, nbytes))
            place += HEADER.size + nbytes + FOOTER.size
            file.seek(place)
    if left_out:
        log.warning("%s: %d records with wrong checksums are left out, such as %s",
                    source, len(left_out), left_out[:5])  # fmt: skip
    return np.array(spans, np.int64).reshape(-1, 2)


def _damaged(name: str, record: int, place: int, reason: str) -> DataError:
    return DataError(
        f"{name}: record {record}, at byte {place}, is damaged: {reason}; expected a whole file; "
        'copy it again, or leave such records out: TFRecord(..., on_error="skip")'
    )


def _decompress(source: Path, target: Path) -> None:
    """Write the content of a compressed file."""
    log.info("decompressing %s to %s", source, target)
    for left in target.parent.glob(f"{glob.escape(target.name)}.tmp-*"):  # by a killed task
        left.unlink()
    with source.open("rb") as file, replaced(target) as draft, draft.open("xb") as plain:
        for part in _decompressed(file):
            plain.write(part)


def _decompressed(file: IO[bytes]) -> Iterator[bytes]:
    engine = zlib.decompressobj(AUTO)
    while chunk := file.read(MIB):
        while chunk:
            if engine.eof:  # a gzip file may have several parts, and zeros behind each
                chunk = chunk.lstrip(b"\0")
                if not chunk:
                    break
                engine = zlib.decompressobj(AUTO)
            yield engine.decompress(chunk)
            chunk = engine.unused_data
    if not engine.eof:
        raise EOFError("the compressed data is cut short")
