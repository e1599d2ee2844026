"""The largest elements and where they are: 8 bytes for each that is sent, none for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.compression.base import received

MAX_RATIO = 0.5  # beyond it more bytes would be sent than without compression
_STRIDE = 61  # of the sample; prime, so that it does not keep to the columns of a matrix
_MARGIN = 8  # elements of the sample


@dataclass(frozen=True, slots=True)
class TopKCompression:
    """The k elements of largest magnitude of each chunk, k = max(1, round(ratio * n)).

    Among equal elements at the border any may be sent. The rest must be kept and sent
    later, or small elements are never sent: Stich et al. 2018, "Sparsified SGD with Memory",
    prove convergence. Lin et al. 2018, "Deep Gradient Compression", choose k for each layer, and
    add momentum correction and a ratio that falls over the first epochs; these are not done here.
    """

    ratio: float
    feedback: ClassVar[bool] = True
    tensors: ClassVar[int] = 2

    @property
    def spec(self) -> str:
        return f"topk:ratio={self.ratio!r}"

    def of_rows(self, dim: int) -> None:
        """Rows are the elements of a table that matter."""

    def encode(self, chunk: Flat) -> tuple[Tensor, ...]:
        indices = _largest(np.abs(chunk), self._kept(len(chunk)))
        return Tensor.of(indices.astype(np.int32)), Tensor.of(chunk[indices])

    def decode(self, tensors: Sequence[Tensor], out: Flat) -> None:
        size = len(out)
        shape = (self._kept(size),)
        indices, values = received(self, tensors, size, ("<i4", shape), ("<f4", shape))
        if size and (indices[0] < 0 or indices[-1] >= size):
            raise ProtocolError(
                f"indices from {indices[0]} to {indices[-1]} in compression {self.spec} of {size} "
                "elements"
            )
        if not np.all(indices[1:] > indices[:-1]):
            raise ProtocolError(f"indices in compression {self.spec} do not rise strictly")
        out.fill(0)
        out[indices] = values

    def _kept(self, size: int) -> int:
        return min(size, max(1, round(self.ratio * size)))


def _largest(magnitudes: Flat, count: int) -> NDArray[np.intp]:
    """Return the indices of the ``count`` largest values, in rising order."""
    candidates = _candidates(magnitudes, count)
    values = magnitudes if candidates is None else magnitudes[candidates]
    start = len(values) - count
    chosen = np.argpartition(values, start)[start:]
    indices = chosen if candidates is None else candidates[chosen]
    indices.sort()
    return indices


def _candidates(magnitudes: Flat, count: int) -> NDArray[np.intp] | None:
    """Return indices among which the ``count`` largest values are, None for all there are.

    To partition all values takes long. So a bound is guessed from a sample, such that about
    2 * count values reach it (as do Lin et al. 2018); if at least count do, the rest are smaller.
    """
    sample = magnitudes[::_STRIDE]
    rank = 2 * count // _STRIDE + _MARGIN
    if 2 * rank > len(sample):
        return None
    start = len(sample) - rank
    bound = np.partition(sample, start)[start]
    reached = np.flatnonzero(magnitudes >= bound)
    return reached if len(reached) >= count else None
