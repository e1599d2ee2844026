"""A file in the format of safetensors that is written bit by bit: its shapes come first.

The format (https://github.com/huggingface/safetensors) has a header of JSON, which says where each
tensor lies, and then all tensors without holes.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Shape(NamedTuple):
    """The dtype and shape of a tensor, known before it is written."""

    dtype: str  # NumPy's name
    shape: tuple[int, ...]


def shapes_of(tensors: Mapping[str, NDArray[Any]]) -> dict[str, Shape]:
    return {name: Shape(array.dtype.name, array.shape) for name, array in tensors.items()}


class TensorFile:
    """A new file of tensors. Every element of them is to be written once."""

    def __init__(
        self, path: Path, shapes: Mapping[str, Shape], metadata: Mapping[str, str] | None = None
    ) -> None:
        """
        Raises:
            OSError: the file cannot be made.
        """
        ordered = sorted(shapes.items(), key=lambda one: (-np.dtype(one[1].dtype).itemsize, one[0]))
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end, self._places = 0, dict[str, tuple[int, int]]()
        for name, (dtype, shape) in ordered:
            row = np.dtype(dtype).itemsize * prod(shape[1:])
            self._places[name] = end, row
            begin, end = end, end + np.dtype(dtype).itemsize * prod(shape)
            named = {"dtype": _name_of(dtype), "shape": shape, "data_offsets": (begin, end)}
            header[name] = named
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self._write(0, len(text).to_bytes(8, "little") + text)
        os.ftruncate(self._descriptor, self._begin + end)

    def write(self, name: str, array: NDArray[Any], at: int = 0) -> None:
        """Write the rows of a tensor from row ``at`` on.

        Raises:
            OSError: the disk failed, or is full.
        """
        begin, row = self._places[name]
        flat = np.ascontiguousarray(array).reshape(-1)
        self._write(self._begin + begin + at * row, flat.view(np.uint8).data)

    def _write(self, at: int, content: Any) -> None:
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._descriptor, rest, at)
            rest, at = rest[written:], at + written


def _name_of(dtype: str) -> str:
    kind, bits = dtype.rstrip("0123456789"), dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    return {"float": "F", "int": "I", "uint": "U", "bool": "BOOL"}[kind] + bits
