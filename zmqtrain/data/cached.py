"""Examples that are read once and kept: in memory, or as arrays in a directory."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from zmqtrain.data.arrays import ArrayDataset
from zmqtrain.data.coerce import as_dataset
from zmqtrain.data.description import describe
from zmqtrain.data.exact import plain
from zmqtrain.data.files import one_task_at_a_time, reading, stamp_of
from zmqtrain.data.subset import Typed, Wrapper, layers
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.files import read_file, replace_file
from zmqtrain.hints import explaining
from zmqtrain.models.base import Array, Batch

log = logging.getLogger(__name__)

ROWS = 1024  # read at a time into a directory
NOTE = "cache.json"  # written last


class Cached(Wrapper):
    """A data set that reads each example of another one once.

    Without a ``directory`` each process keeps its examples in memory, as they are used. With one,
    the first task reads all of them into files there, which are mapped into memory: for data that
    is larger than memory or slow to decode. Augmentation belongs outside:
    ``Mapped(Cached(data), augment)``.
    """

    def __init__(self, examples: Any, directory: str | Path | None = None) -> None:
        """``examples``: a tuple of arrays, a Dataset, or one of torch."""
        super().__init__(Typed(as_dataset(examples), has_one_shape=True))
        self.directory = None if directory is None else Path(directory)
        self._kept: tuple[NDArray[np.bool_], list[NDArray[Any]]] | None = None

    def take(self, indices: Array) -> Batch:
        if self.directory is not None:
            return self._stored.take(indices)
        indices = np.asarray(indices)
        is_kept, arrays = self._kept or (np.zeros(len(self), np.bool_), None)
        missing = np.unique(indices[~is_kept[indices]])
        if arrays is None or missing.size:
            batch = self.dataset.take(missing)
            if arrays is None:
                arrays = self._room(batch)
                self._kept = is_kept, arrays
            for rows, array in zip(batch, arrays, strict=True):
                array[missing] = rows
            is_kept[missing] = True
        return tuple(array[indices] for array in arrays)

    def __repr__(self) -> str:
        return f"Cached({self.dataset!r}{f', {str(self.directory)!r}' if self.directory else ''})"

    def _room(self, batch: Batch) -> list[NDArray[Any]]:
        """Return room for all examples, which are like those of this batch."""
        like = [plain(array, f"an array of {self.dataset!r}") for array in batch]
        nbytes = len(self) * sum(a.itemsize * prod(a.shape[1:]) for a in like)
        free = psutil.virtual_memory().available
        if nbytes > free:
            raise ConfigError(
                f"the cache of {self.dataset!r} needs {nbytes >> 20} MiB of memory, and this host "
                f"has {free >> 20} MiB left; give it a directory: Cached(data, directory)"
            )
        log.info("the cache of %r takes up to %d MiB", self.dataset, nbytes >> 20)
        return [np.empty((len(self), *a.shape[1:]), a.dtype) for a in like]

    @cached_property
    def _stored(self) -> ArrayDataset:
        """The examples in the directory, which the first task writes."""
        directory = Path(self.directory or "")
        note, description = directory / NOTE, self._description()
        if not note.exists():
            with one_task_at_a_time(note):
                if not note.exists():
                    self._write(directory, note, description)
        with reading(note):
            found = json.loads(read_file(note))
        if found["data"] != description:
            raise DataError(
                f"{directory} holds {found['data']}, but {self.dataset!r} has {description}; "
                "remove that directory, or give another one"
            )
        return ArrayDataset(*(np.load(directory / name, "r") for name in found["files"]))

    def _description(self) -> str:
        """Describe the examples, and the whole files or arrays of their source."""
        digest = hashlib.blake2b(digest_size=6)
        for layer in layers(self.dataset):
            for path in getattr(layer, "source_files", ()):
                digest.update(f"{path.name} {stamp_of(path.stat())}".encode())
            for array in layer.arrays if isinstance(layer, ArrayDataset) else ():
                if not isinstance(array, np.memmap):
                    digest.update(np.asarray(array).tobytes())
        return f"{describe(self.dataset)}, source {digest.hexdigest()}"

    def _write(self, directory: Path, note: Path, description: str) -> None:
        log.info("reading %r into %s", self.dataset, directory)
        first = self.dataset.take(np.arange(1))
        names = [f"{place}.npy" for place in range(len(first))]
        remedy = "expected room for all examples of the data; make room, or give another directory"
        with explaining(f"{directory} cannot be written", remedy, DataError):
            files = [
                open_memmap(directory / name, "w+", array.dtype, (len(self), *array.shape[1:]))
                for name, array in zip(names, map(np.asarray, first), strict=True)
            ]
            for start in range(0, len(self), ROWS):
                numbers = np.arange(start, min(start + ROWS, len(self)))
                for rows, file in zip(self.dataset.take(numbers), files, strict=True):
                    file[numbers] = rows
            for file in files:
                file.flush()
            replace_file(note, json.dumps({"data": description, "files": names}).encode())
