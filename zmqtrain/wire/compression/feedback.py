"""Both sides of a compressed gradient, with error feedback: its loss is added to the next gradient.

The elements behind a shard's trained ones are state, which is sent as it is, in its own tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.chunks import take_in
from zmqtrain.wire.compression.base import Compression


class Compressor:
    """A worker's side of one shard's gradient.

    If the compression needs feedback, this keeps the shard's residual: the sum of all losses.
    So nothing of a gradient is lost, it only arrives later (Seide et al.
    2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs"; Stich et al. 2018; Karimireddy et al. 2019). The gradients that a ps
    does not apply are gone, as they are without compression.
    """

    def __init__(self, compression: Compression, size: int, *, keeps: bool = True) -> None:
        """``size``: trained elements of the shard. ``keeps``: a residual, if feedback needs one."""
        self.compression, self._size = compression, size
        keeps = keeps and compression.feedback
        self._residual: Flat | None = np.zeros(size, np.float32) if keeps else None
        self._held: list[tuple[slice, Flat]] = []

    def encode(self, start: int, chunk: Flat) -> tuple[Tensor, ...]:
        """Return the encoded ``chunk``, the gradient's elements from ``start`` on.

        Call it once for each chunk and step, in any order: every call changes the residual. A push
        is sent again from the tensors of its first sending.
        """
        trained, state = _cut(start, chunk, self._size)
        tensors = self._encode(start, trained) if len(trained) or not len(state) else ()
        return (*tensors, Tensor.of(state)) if len(state) else tensors

    def hold(self, runs: Sequence[slice]) -> None:
        """Keep the residual of these elements, which have no gradient now, until the next call."""
        if self._residual is None:
            return
        for run, values in self._held:
            self._residual[run] += values
        self._held = [(run, self._residual[run].copy()) for run in runs]
        for run in runs:
            self._residual[run] = 0

    def forget(self) -> None:
        """Clear the residual: a gradient was not finite, or something else is sent now."""
        self._held.clear()
        if self._residual is not None:
            self._residual.fill(0)

    def _encode(self, start: int, chunk: Flat) -> tuple[Tensor, ...]:
        if self._residual is None:
            return self.compression.encode(chunk)
        total = self._residual[start : start + len(chunk)]
        try:
            with np.errstate(over="raise"):
                np.add(total, chunk, out=total)
        except FloatingPointError:  # the sum is there; an infinity would stay in it forever
            largest = np.finfo(np.float32).max
            np.clip(total, -largest, largest, out=total)
        tensors = self.compression.encode(total)
        arriving = np.empty_like(total)
        self.compression.decode(tensors, arriving)
        np.subtract(total, arriving, out=total)
        return tensors


class Decompressor:
    """The receiver's side of one shard's gradient, or of a difference between its parameters."""

    def __init__(self, compression: Compression | None, size: int) -> None:
        """``compression``: None if values are sent as they are. ``size``: trained elements."""
        self._compression, self._size = compression, size

    def decode(self, start: int, tensors: Sequence[Tensor], out: Flat) -> None:
        """Overwrite ``out``, the gradient's elements from ``start`` on, with an encoded chunk.

        Raises:
            ProtocolError: the tensors are not those of such a chunk.
        """
        if self._compression is None:
            take_in(tensors, out)
            return
        trained, state = _cut(start, out, self._size)
        if len(state):
            take_in(tensors[-1:], state)
            tensors = tensors[:-1]
        if tensors or len(trained) or not len(state):
            self._compression.decode(tensors, trained)

    def add(self, start: int, tensors: Sequence[Tensor], out: Flat) -> None:
        """Add an encoded difference to ``out``; its state is overwritten.

        Raises:
            ProtocolError: the tensors are not those of such a chunk.
        """
        found = np.empty_like(out)
        self.decode(start, tensors, found)
        trained, state = _cut(start, out, self._size)
        difference, values = _cut(start, found, self._size)
        np.add(trained, difference, out=trained)
        np.copyto(state, values)


def _cut(start: int, chunk: Flat, size: int) -> tuple[Flat, Flat]:
    """Cut the shard's elements from ``start`` on into trained ones and state."""
    trained = max(0, size - start)
    return chunk[:trained], chunk[trained:]
