"""A worker's view of the parameters and of its gradient: whole variables over the shards' memory.

A shard is one flat array, in the ps's segment or a copy of it. The model needs whole named
variables. A variable that is in one shard is a view of that shard's array, without a copy. One that
is cut over several shards is gathered before the model runs and scattered after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.store.layout import ShardLayout, Slice, Variable


class WorkerMemory:
    """Named variables over one flat float32 array for each shard."""

    def __init__(
        self, variables: Sequence[Variable], layouts: Sequence[ShardLayout], flats: Sequence[Flat]
    ) -> None:
        """``flats``: each of shape (layout.size,); the variables are views of them if possible."""
        self.flats = flats
        self.values: dict[str, Any] = {}
        # By variable: (view of the whole variable, view of the shard).
        self._cut: dict[str, list[tuple[Any, Any]]] = {}
        found: dict[str, list[tuple[Slice, Any]]] = {variable.name: [] for variable in variables}
        for layout, flat in zip(layouts, flats, strict=True):
            for cut, view in zip(layout.slices, layout.views(flat), strict=True):
                found[cut.variable.name].append((cut, view))
        for variable in variables:
            cuts = found[variable.name]
            if len(cuts) == 1:
                self.values[variable.name] = cuts[0][1]
                continue
            whole = np.empty_like(flats[0], shape=variable.shape)
            self.values[variable.name] = whole
            self._cut[variable.name] = [(cut.of(whole), view) for cut, view in cuts]

    def gather(self) -> None:
        """Copy the flat arrays into the variables that are cut."""
        for parts in self._cut.values():
            for part, view in parts:
                part[...] = view

    def scatter(self, *names: str) -> None:
        """Copy the variables that are cut, or those of these names, into the flat arrays."""
        for name in names or self._cut:
            for part, view in self._cut.get(name, ()):
                view[...] = part
