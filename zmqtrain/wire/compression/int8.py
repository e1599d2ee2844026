"""8-bit integers, just under a quarter of the bytes: each block of elements has a scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zmqtrain.compute.arrays import BLOCK_SIZE, Flat, blocks
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.compression.base import Compression, received
from zmqtrain.wire.compression.halves import Bf16

MIN_BLOCK, MAX_BLOCK = 8, 32_768
"""A shorter block's scale would undo the saving; with a longer one too much of a gradient would be
lost at a time (see :class:`Int8`)."""

_LEVELS = 127  # on either side of 0; -128 is not used
_MIN_SCALE = np.finfo(np.float32).tiny
_MAX_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(_LEVELS), np.float32(0))
"""Within these bounds neither 1 / scale nor 127 * scale is infinite."""


@dataclass(frozen=True, slots=True)
class Int8:
    """Symmetric: x is sent as rint(x / scale), with scale = max|x| / 127 over the element's block.

    So the error is at most scale / 2. An element below that vanishes, at every step if its block
    is always larger: rounding to the nearest is biased. With error feedback it arrives a few steps
    later, and SGD converges as without compression if the error's norm is less than the gradient's
    (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes"; first used for 1-bit gradients: Seide et al. 2014). It is: the squared error of a
    block is at most block * scale^2 / 4 = block / 64516 * max|x|^2.

    The scale of a block of zeros is the smallest there is, so that no division needs a condition.
    """

    block: int
    feedback: ClassVar[bool] = True
    tensors: ClassVar[int] = 2

    @property
    def spec(self) -> str:
        return f"int8:block={self.block}"

    def of_rows(self, dim: int) -> Compression:
        """Have a scale for each row: beside a row that many examples have, others would vanish."""
        return Int8(dim) if MIN_BLOCK <= dim <= MAX_BLOCK else Bf16()

    def encode(self, chunk: Flat) -> tuple[Tensor, ...]:
        size = len(chunk)
        codes = np.empty(size, np.int8)
        scales = np.empty(self._blocks(size), np.float32)
        scratch = np.empty(min(size, BLOCK_SIZE), np.float32)
        for run, scaled_by, width in self._runs(size):
            values, own = chunk[run].reshape(-1, width), scales[scaled_by]
            scaled = scratch[: values.size].reshape(values.shape)
            np.abs(values, out=scaled)
            # Bits of floats without a sign are ordered as they are, and integers compare faster.
            np.max(scaled.view(np.int32), axis=1, out=own.view(np.int32))
            np.divide(own, np.float32(_LEVELS), out=own)
            np.clip(own, _MIN_SCALE, _MAX_SCALE, out=own)
            np.multiply(values, (1 / own)[:, np.newaxis], out=scaled)
            np.rint(scaled, out=scaled)
            np.copyto(codes[run].reshape(values.shape), scaled, casting="unsafe")
        return Tensor.of(codes), Tensor.of(scales)

    def decode(self, tensors: Sequence[Tensor], out: Flat) -> None:
        size = len(out)
        shape = (self._blocks(size),)
        codes, scales = received(self, tensors, size, ("|i1", out.shape), ("<f4", shape))
        if not np.all((scales >= _MIN_SCALE) & (scales <= _MAX_SCALE)):  # nor NaN
            raise ProtocolError(
                f"a scale in compression {self.spec} is not in [{_MIN_SCALE:.4g}, {_MAX_SCALE:.4g}]"
            )
        if np.min(codes, initial=0) < -_LEVELS:
            raise ProtocolError(f"a code in compression {self.spec} is -128, expected -127 to 127")
        for run, scaled_by, width in self._runs(size):
            values = out[run].reshape(-1, width)
            np.copyto(values, codes[run].reshape(values.shape))
            np.multiply(values, scales[scaled_by, np.newaxis], out=values)

    def _blocks(self, size: int) -> int:
        return -(-size // self.block)

    def _runs(self, size: int) -> Iterator[tuple[slice, slice, int]]:
        """Yield runs of elements, the blocks they are made of, and the length of each block."""
        whole = size - size % self.block
        for run in blocks(whole, BLOCK_SIZE - BLOCK_SIZE % self.block):
            yield run, slice(run.start // self.block, run.stop // self.block), self.block
        if whole < size:
            yield slice(whole, size), slice(whole // self.block, None), size - whole
