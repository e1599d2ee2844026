"""Reader of IDX files, the format of MNIST (http://yann.lecun.com/exdb/mnist/).

A file is: two zero bytes, a type code, the number of dimensions (one byte), each dimension as a
big-endian uint32, then the items in C order, big-endian. It may be gzipped.
"""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import DataError

TYPE_CODES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_DIMENSIONS = 32  # of an array in NumPy 1
GZIP_MAGIC = b"\x1f\x8b"
DEFLATE_MAX_RATIO = 1032  # bytes out for a byte in; see https://zlib.net/zlib_tech.html


def read_idx(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Return the array in the IDX file at ``path``, in native byte order.

    The first bytes show whether it is gzipped. The amount of memory is bounded by the file's size.

    Raises:
        DataError: the file cannot be read or is not one whole IDX file; the text names the file,
            what was found, what was expected and the remedy.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            stored_nbytes = os.fstat(raw.fileno()).st_size
            zipped = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            if not zipped:
                return _read_array(path, raw, stored_nbytes)
            with gzip.GzipFile(fileobj=raw, mode="rb") as unzipped:
                most_nbytes = stored_nbytes * DEFLATE_MAX_RATIO
                return _read_array(path, cast(IO[bytes], unzipped), most_nbytes)
    except (gzip.BadGzipFile, zlib.error, EOFError) as cause:
        found = f"gzip data that cannot be unpacked ({cause})"
        raise _damaged(path, found, "one whole gzip file") from cause
    except OSError as cause:
        raise DataError(
            f"{path}: cannot be read ({cause.strerror or cause}); expected a readable IDX file; "
            "check the path and its permissions"
        ) from cause


def _read_array(path: Path, file: IO[bytes], most_nbytes: int) -> NDArray[Any]:
    """Read the whole of ``file``, which holds at most ``most_nbytes``."""
    dtype, shape = _read_header(path, file)
    nbytes = prod(shape) * dtype.itemsize
    # Without zeros, since NumPy also refuses (0, 2**63).
    addressable = prod(filter(None, shape)) * dtype.itemsize <= sys.maxsize
    if nbytes > most_nbytes or not addressable:
        raise _damaged(
            path,
            f"the shape {shape}, {nbytes} bytes of items",
            f"at most {most_nbytes}, all that a file of this size can hold",
        )
    items = file.read(nbytes)
    if len(items) < nbytes:
        raise _damaged(path, f"{len(items)} bytes of items", f"{nbytes} for the shape {shape}")
    if file.read(1):
        raise _damaged(path, "bytes after the last item", f"{nbytes} for the shape {shape}")
    return np.frombuffer(items, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _read_header(path: Path, file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        found = magic.hex(" ") or "(none)"
        raise _damaged(path, f"the first bytes {found}", "00 00, a type code, a dimension count")
    code, dimensions = magic[2], magic[3]
    if code not in TYPE_CODES:
        known = ", ".join(f"0x{code:02x}" for code in TYPE_CODES)
        raise _damaged(path, f"the type code 0x{code:02x}", f"one of {known}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise _damaged(path, f"{dimensions} dimensions", f"1 to {MAX_DIMENSIONS}")
    sizes = file.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise _damaged(path, f"{len(sizes)} bytes of dimensions", f"{4 * dimensions}")
    return np.dtype(TYPE_CODES[code]), tuple(np.frombuffer(sizes, ">u4").tolist())


def _damaged(path: Path, found: str, expected: str) -> DataError:
    return DataError(
        f"{path}: found {found}; expected {expected}; "
        "the file is damaged or not IDX: download it again"
    )
