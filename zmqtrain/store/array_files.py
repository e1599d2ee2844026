"""Arrays by name in one file, ``.npz`` or ``.safetensors``, written block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError
from zmqtrain.files import replaced
from zmqtrain.store.durable import sync_path, writing
from zmqtrain.store.tensor_file import Shape, TensorFile


@dataclass(frozen=True, slots=True)
class ArrayStream:
    """An array whose rows come in blocks, one after the other."""

    dtype: str  # NumPy's name
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[NDArray[Any]]]


def check_ending(path: Path, what: str = "weights", *others: str) -> None:
    """Check that a path has the ending of a file of arrays, or one of ``others``.

    Raises:
        ConfigError: it has not.
    """
    known = [".safetensors", ".npz", *others]
    if path.suffix not in known:
        text = ", ".join(known[:-1])
        raise ConfigError(
            f"{what} in {str(path)!r}; expected a path that ends with {text} or {known[-1]}"
        )


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any] | ArrayStream]) -> None:
    """Write arrays into one file, which replaces an older one; directories are made.

    Raises:
        CheckpointError: it cannot be written.
    """
    streams = {name: _stream(array) for name, array in arrays.items()}
    write = _write_npz if path.suffix == ".npz" else _write_safetensors
    write_file(path, lambda temporary: write(temporary, streams))


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let a function write a file that comes in place of ``path`` when it is complete.

    Raises:
        CheckpointError: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            write(temporary)
            sync_path(temporary)


def _stream(array: NDArray[Any] | ArrayStream) -> ArrayStream:
    if isinstance(array, ArrayStream):
        return array
    return ArrayStream(array.dtype.name, array.shape, lambda: iter([array]))


def _write_npz(path: Path, streams: Mapping[str, ArrayStream]) -> None:
    """Write as numpy.savez does, which cannot write an array called "file"."""
    with ZipFile(path, "w") as file:
        for name, each in streams.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                descr = np.dtype(each.dtype).str
                header = {"shape": each.shape, "fortran_order": False, "descr": descr}
                write_array_header_1_0(entry, header)
                for block in each.blocks():
                    entry.write(np.ascontiguousarray(block).data)


def _write_safetensors(path: Path, streams: Mapping[str, ArrayStream]) -> None:
    file = TensorFile(path, {name: Shape(each.dtype, each.shape) for name, each in streams.items()})
    try:
        for name, each in streams.items():
            begin = 0
            for block in each.blocks():
                file.write(name, block, begin)
                begin += len(block) if block.ndim else 1
    finally:
        file.close()
