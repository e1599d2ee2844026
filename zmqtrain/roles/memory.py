"""A worker's copy of the parameters and its gradient, as the model and as the shards see them.

A shard's part travels as one flat array; the model wants whole named variables. With one ps both
are views of the same memory and nothing is copied between them; with more, each shard's part is
gathered from and scattered to the variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError
from zmqtrain.store.layout import ShardLayout, Variable, empty_values

Flat = NDArray[np.float32]


class WorkerMemory:
    """Named variables backed by one flat float32 array for each shard."""

    def __init__(self, variables: Sequence[Variable], layouts: Sequence[ShardLayout]) -> None:
        self.layouts = layouts
        self.flats: list[Flat] = [np.zeros(layout.size, np.float32) for layout in layouts]
        self._shared = len(layouts) == 1
        if self._shared:
            views = zip(layouts[0].slices, layouts[0].views(self.flats[0]), strict=True)
            self.values: dict[str, Any] = {piece.variable.name: view for piece, view in views}
        else:
            self.values = empty_values(variables)

    def scatter(self, shard: int) -> None:
        """Bring what lies in a shard's flat array into the variables."""
        if not self._shared:
            self.layouts[shard].scatter(self.flats[shard], self.values)

    def gather(self) -> None:
        """Bring the variables into the shards' flat arrays."""
        if not self._shared:
            for layout, flat in zip(self.layouts, self.flats, strict=True):
                layout.gather(self.values, flat)


class Device:
    """Where a worker's model computes: its arrays stand beside those of the host."""

    def __init__(self, name: str) -> None:
        """``name``: "cpu", or "gpu" for CuPy on the current CUDA device.

        Raises:
            ConfigError: CuPy is not installed, or finds no GPU.
        """
        self._cupy = _load_cupy() if name == "gpu" else None

    def upload(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return arrays for the model to read: the host's own, or copies on the GPU."""
        if self._cupy is None:
            return values
        return {name: self._cupy.asarray(value) for name, value in values.items()}

    def buffers(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return arrays for the model to write its gradients into, in a mapping of their own."""
        if self._cupy is None:
            return dict(values)
        return {name: self._cupy.empty_like(self._cupy.asarray(v)) for name, v in values.items()}

    def batch(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a batch where the model computes."""
        if self._cupy is None:
            return arrays
        return tuple(self._cupy.asarray(array) for array in arrays)

    def download(self, buffers: dict[str, Any], values: dict[str, Any]) -> None:
        """Bring the gradients into the host's arrays."""
        if self._cupy is not None:
            for name, value in values.items():
                buffers[name].get(out=value)


def _load_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            "the job's device is gpu, but CuPy is not installed: install zmqtrain[cuda12] or "
            "zmqtrain[cuda13], or use --device cpu"
        ) from error
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(
            f"the job's device is gpu, but CUDA finds none ({error}): use --device cpu"
        ) from error
    return cupy
