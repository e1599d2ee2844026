"""Rows of a table in a checkpoint, whatever shards wrote them, by blocks in the order of ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from zmqtrain.errors import CheckpointError
from zmqtrain.files import check_regular
from zmqtrain.models.tables import Ids, Rows
from zmqtrain.store.manifest import Manifest

CHUNK = 1 << 16
"""Rows that are read at once."""


@contextmanager
def reading(file: Path) -> Iterator[Any]:
    """Yield the tensors of a file; turn errors of this context into a CheckpointError."""
    try:
        check_regular(file)
        yield safe_open(file, framework="np")
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error}; resume from another checkpoint"
        ) from error


class _Part(NamedTuple):
    """The rows of one file. ``first``: number of its first row among those of all files."""

    file: Path
    tensors: list[Any]
    first: int
    end: int


class SavedRows:
    """A choice of the rows of a table; at first all of them.

    ``ids``: sorted ids of the chosen rows. ``stamps``: the update that trained each of them last.
    ``version``: updates that each shard had made at least.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        table: str,
        widths: Mapping[str, int],
        *,
        keys: tuple[str, str] = ("ids", "stamps"),
        own: Callable[[Ids], NDArray[np.bool_]] | None = None,
    ) -> None:
        """``widths``: elements of a row in each tensor to be read. ``keys``: names of the tensors
        of ids and stamps. ``own``: which ids count at all.

        Raises:
            CheckpointError: a file is damaged.
        """
        self._widths = widths
        self._parts: list[_Part] = []
        versions, end = [], 0
        found = [[np.empty(0, np.int64)] for _ in range(3)]  # ids, stamps, places
        for written in manifest.files:
            file = path / written.file
            with reading(file) as tensors:
                if not (slices := _slices(tensors, table, [*keys, *widths], widths)):
                    continue
                first, end = end, end + slices[0].get_shape()[0]
                self._parts.append(_Part(file, slices[2:], first, end))
                versions.append(written.version)
                for begin in range(0, end - first, CHUNK):
                    stop = min(begin + CHUNK, end - first)
                    ids, stamps = (each[begin:stop] for each in slices[:2])
                    chosen = np.flatnonzero(own(ids)) if own is not None else np.arange(len(ids))
                    block = ids[chosen], stamps[chosen], first + begin + chosen
                    for arrays, array in zip(found, block, strict=True):
                        arrays.append(array)
        self.ids, self.stamps, self._places = (np.concatenate(arrays) for arrays in found)
        self.version = min(versions, default=0)
        self._choose(np.argsort(self.ids))

    def choose(self, since: int = 0, most: int | None = None) -> None:
        """Choose the rows that an update after number ``since`` has trained, and of these the
        ``most`` that were trained last; of equals those with lower ids."""
        self._choose(np.flatnonzero(self.stamps > since))
        if most is not None and len(self.ids) > most:
            self._choose(np.sort(np.argsort(-self.stamps, kind="stable")[:most]))

    def blocks(self) -> Iterator[tuple[Ids, list[Rows]]]:
        """Yield the chosen ids, and their rows of each width.

        Raises:
            CheckpointError: a file cannot be read.
        """
        for begin in range(0, len(self.ids), CHUNK):
            places = self._places[begin : begin + CHUNK]
            rows = [np.empty((len(places), width), np.float32) for width in self._widths.values()]
            for part in self._parts:
                own = np.flatnonzero((places >= part.first) & (places < part.end))
                with reading(part.file):
                    for array, tensor in zip(rows, part.tensors, strict=True):
                        array[own] = _rows_at(tensor, places[own] - part.first)
            yield self.ids[begin : begin + CHUNK], rows

    def read(self) -> list[Rows]:
        """Return all chosen rows, of each width.

        Raises:
            CheckpointError: a file cannot be read.
        """
        found = [np.empty((len(self.ids), width), np.float32) for width in self._widths.values()]
        for number, (ids, rows) in enumerate(self.blocks()):
            for array, block in zip(found, rows, strict=True):
                array[number * CHUNK :][: len(ids)] = block
        return found

    def _choose(self, chosen: NDArray[np.int64]) -> None:
        self.ids, self.stamps = self.ids[chosen], self.stamps[chosen]
        self._places = self._places[chosen]


def _slices(tensors: Any, table: str, names: list[str], widths: Mapping[str, int]) -> list[Any]:
    """Return tensors of a table, to be read by slices; [] if the file has none."""
    keys = [f"/{name}/{table}" for name in names]
    if keys[0] not in tensors.keys():  # the file of frozen values, or counts that nobody kept
        return []
    found = [tensors.get_slice(key) for key in keys]
    for name, key, each in zip(names, keys, found, strict=True):
        shape = [found[0].get_shape()[0], *([widths[name]] if name in widths else [])]
        if each.get_shape() != shape:
            raise ValueError(f"{key!r} has shape {each.get_shape()}, expected {shape}")
    return found


def _rows_at(tensor: Any, places: NDArray[np.int64]) -> Rows:
    """Return rows by their ascending numbers, which may be far apart."""
    found, begin = np.empty((len(places), tensor.get_shape()[1]), np.float32), 0
    while begin < len(places):
        low = int(places[begin])
        end = int(np.searchsorted(places, low + CHUNK))
        found[begin:end] = tensor[low : int(places[end - 1]) + 1][places[begin:end] - low]
        begin = end
    return found
