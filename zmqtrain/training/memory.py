"""A worker's view of the parameters and of its gradient: whole variables over the shards' memory.

A shard is one flat array, in the ps's segment or a copy of it. The model needs whole named
variables. A float32 variable that is in one shard is a view of that shard's array, without a copy.
One that is cut over several shards, or of another dtype, is gathered before the model runs and
scattered after. A slice that is a copy is never read, but written after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.store.layout import ShardLayout, Slice, Variable, decode, encode


class WorkerMemory:
    """Named variables over one flat float32 array for each shard."""

    def __init__(
        self,
        variables: Sequence[Variable],
        layouts: Sequence[ShardLayout],
        flats: Sequence[Flat],
        byte_state: Sequence[Flat] = (),
    ) -> None:
        """``flats``: each of shape (layout.size,); the variables are views of them if possible.

        ``byte_state``: variables that are encoded as bytes; () if these are in ``flats``.
        """
        self.flats, self.byte_state = flats, byte_state
        self.values: dict[str, Any] = {}
        # By variable: (view of the whole variable, run of its shard).
        self._gathered: dict[str, list[tuple[Any, Any]]] = {}
        self._scattered: dict[str, list[tuple[Any, Any]]] = {}
        found: dict[str, list[tuple[Slice, Any]]] = {variable.name: [] for variable in variables}
        copies: dict[str, list[tuple[Slice, Any]]] = {variable.name: [] for variable in variables}
        for shard, layout in enumerate(layouts):
            for cut in layout.slices:
                run = cut.run(flats[shard])
                if byte_state and cut.offset >= layout.averaged:
                    start = cut.offset - layout.averaged
                    run = byte_state[shard][start : start + cut.size]
                (copies if cut.copy else found)[cut.variable.name].append((cut, run))
        for variable in variables:
            name, cuts = variable.name, found[variable.name]
            if len(cuts) == 1 and variable.dtype == "float32":
                whole, cuts = cuts[0][1].reshape(variable.shape), []
            else:
                whole = np.empty_like(flats[0], variable.dtype, shape=variable.shape)
            self.values[name] = whole
            if cuts:
                self._gathered[name] = [(cut.of(whole), run) for cut, run in cuts]
            if cuts or copies[name]:
                written = (*cuts, *copies[name])
                self._scattered[name] = [(cut.of(whole), run) for cut, run in written]

    def gather(self) -> None:
        """Copy the flat arrays into the variables that are not views of them."""
        for parts in self._gathered.values():
            for part, run in parts:
                decode(run, part)

    def scatter(self, *names: str) -> None:
        """Copy these variables, or all that are not views, into the flat arrays."""
        for name in names or self._scattered:
            for part, run in self._scattered.get(name, ()):
                encode(part, run)
