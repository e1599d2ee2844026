"""Error feedback: what encoding lost of one gradient is added to the next."""

from __future__ import annotations

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.compression.base import Compression


class Compressor:
    """A worker's side of one shard's gradient.

    Where the compression asks for feedback, it keeps the shard's residual: all that was to be sent
    up to now and was not. So nothing of a gradient is lost, it only arrives later (Seide et al.
    2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs"; Stich et al. 2018; Karimireddy et al. 2019). The gradients that a ps
    does not apply are gone, as they are without compression.
    """

    def __init__(self, compression: Compression, size: int) -> None:
        """``size``: elements of the shard's gradient."""
        self._compression = compression
        self._residual: Flat | None = np.zeros(size, np.float32) if compression.feedback else None

    def encode(self, start: int, chunk: Flat) -> tuple[Tensor, ...]:
        """Return the encoded ``chunk``, the gradient's elements from ``start`` on.

        Call it once for each chunk and step, in any order: every call changes the residual.
        So a push that has to be sent again is sent from the tensors of the first time.
        """
        if self._residual is None:
            return self._compression.encode(chunk)
        total = self._residual[start : start + len(chunk)]
        try:
            with np.errstate(over="raise"):
                np.add(total, chunk, out=total)
        except FloatingPointError:  # the sum is there; an infinity would stay in it for ever
            largest = np.finfo(np.float32).max
            np.clip(total, -largest, largest, out=total)
        tensors = self._compression.encode(total)
        arriving = np.empty_like(total)
        self._compression.decode(tensors, arriving)
        np.subtract(total, arriving, out=total)
        return tensors
