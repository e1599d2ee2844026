"""Reader of IDX files, the format of MNIST (http://yann.lecun.com/exdb/mnist/).

A file is: two zero bytes, a type code, the number of dimensions (one byte), each dimension as a
big-endian uint32, then the items in C order, big-endian. It may be gzipped.
"""

from __future__ import annotations

import gzip
import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.files import reading

DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Return the array in the IDX file at ``path``, in native byte order.

    Raises:
        DataError: the file cannot be read or is not one whole IDX file.
    """
    with reading(path):
        content = Path(path).read_bytes()
        if content[:2] == GZIP_MAGIC:
            content = gzip.decompress(content)
        code, dimensions = content[2], content[3]
        if content[:2] != b"\0\0" or code not in DTYPES or not dimensions:
            raise ValueError(f"it begins with {content[:4].hex(' ')}, as no IDX file does")
        dtype = np.dtype(DTYPES[code])
        shape = np.frombuffer(content, ">u4", dimensions, offset=4).tolist()
        found = len(content) - 4 - 4 * dimensions
        if found != prod(shape) * dtype.itemsize:
            raise ValueError(f"{found} bytes of items for the shape {shape} of {dtype}")
        items = np.frombuffer(content, dtype, offset=len(content) - found)
        return items.reshape(shape).astype(dtype.newbyteorder("="))
