"""16-bit floats, half the bytes: IEEE binary16 ("fp16") and bfloat16 ("bf16").

Both round to the nearest value, ties to the even one. fp16 has 11 significant bits, down to 2^-14
(its subnormals are multiples of 2^-24, so what is below 2^-25 becomes 0), and ends at 65504; bf16
has 8 significant bits and the range of float32. What is beyond the largest finite value becomes
that value rather than infinity: one element out of range must not cost the whole gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import BLOCK_SIZE, Flat, blocks
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.compression.base import received

Codes: TypeAlias = NDArray[np.uint16]

_ONE = np.uint32(1)
_HALF = np.uint32(16)  # bits
_SIGN = np.uint32(0x8000)


class _Half(ABC):
    spec: ClassVar[str]
    feedback = False
    tensors = 1
    _largest: ClassVar[np.float32]
    _nan: ClassVar[np.uint16]
    _scratch: ClassVar[int]  # float32 buffers that _round needs

    def of_rows(self, dim: int) -> Self:
        return self

    def _encoded(self, chunk: Flat) -> Codes:
        size = len(chunk)
        codes = np.empty(size, np.uint16)
        scratch = np.empty((self._scratch, min(size, BLOCK_SIZE)), np.float32)
        for run in blocks(size):
            block, room = chunk[run], scratch[:, : run.stop - run.start]
            if self._is_within(block):
                self._round(block, codes[run], room)
            else:
                nan = np.isnan(block)
                limited = np.where(nan, 0, np.clip(block, -self._largest, self._largest))
                self._round(limited, codes[run], room)
                codes[run][nan] = self._nan
        return codes

    def _is_within(self, block: Flat) -> bool:
        """Return whether the norm, and so every element, is in range; False decides nothing.

        The scalar product takes half the time of a minimum and a maximum.
        """
        with np.errstate(all="ignore"):
            return float(np.dot(block, block)) <= float(self._largest) ** 2 / 2

    @abstractmethod
    def _round(self, block: Flat, codes: Codes, scratch: NDArray[np.float32]) -> None:
        """Fill in the codes of a block that is in range."""


class Fp16(_Half):
    """IEEE 754 binary16: NumPy's cast bit for bit, in little more than half its time."""

    spec = "fp16"
    _largest = np.float32(65504)
    _nan = np.uint16(0x7E00)
    _scratch = 3

    _exponent = np.uint32(0x7F800000)
    _shift = np.uint32(13)  # bits of a float32's fraction that binary16 lacks
    # Adding 2^(e+13) to a value with exponent e rounds it to multiples of 2^(e-10), the last place
    # of binary16, and leaves their number in the sum's fraction. The code is this number plus
    # (e + 14) << 10; float32 stores e + 127. Of the difference, -113 << 10, 15 << 10 is left modulo
    # 2^16, hence 15 * 2^e more.
    _magic = np.float32(2.0**13 + 15)

    def encode(self, chunk: Flat) -> tuple[Tensor, ...]:
        return (Tensor.of(self._encoded(chunk).view(np.float16)),)

    def decode(self, tensors: Sequence[Tensor], out: Flat) -> None:
        (values,) = received(self, tensors, len(out), ("<f2", out.shape))
        codes = values.view(np.uint16)
        for run in blocks(len(out)):
            # Any mode but "raise" writes straight into ``out``; every code is an index.
            np.take(_FP16_VALUES, codes[run], out=out[run], mode="clip")

    def _round(self, block: Flat, codes: Codes, scratch: NDArray[np.float32]) -> None:
        sums, powers, others = scratch
        exponents, more = powers.view(np.uint32), others.view(np.uint32)
        bits = sums.view(np.uint32)  # of which the lower 16 become the code
        np.abs(block, out=sums)
        np.maximum(sums, _SMALLEST_NORMAL[: len(block)], out=powers)
        np.bitwise_and(exponents, self._exponent, out=exponents)
        np.right_shift(exponents, self._shift, out=more)
        np.multiply(powers, self._magic, out=powers)
        np.add(sums, powers, out=sums)
        np.add(bits, more, out=bits)
        np.right_shift(block.view(np.uint32), _HALF, out=more)
        np.bitwise_and(more, _SIGN, out=more)
        np.add(bits, more, out=codes, casting="unsafe")


class Bf16(_Half):
    """bfloat16: the upper half of a float32. It is sent as bytes: NumPy has no such dtype."""

    spec = "bf16"
    _largest = np.float32((2 - 2.0**-7) * 2.0**127)
    _nan = np.uint16(0x7FC0)
    _scratch = 1

    _below_half = np.uint32(0x7FFF)  # of the unit that is kept

    def encode(self, chunk: Flat) -> tuple[Tensor, ...]:
        codes = self._encoded(chunk)
        return (Tensor.of(codes.view(np.uint8).reshape(len(chunk), 2)),)

    def decode(self, tensors: Sequence[Tensor], out: Flat) -> None:
        (pairs,) = received(self, tensors, len(out), ("|u1", (len(out), 2)))
        codes: NDArray[Any] = pairs.reshape(-1).view(np.uint16)
        np.left_shift(codes, _HALF, out=out.view(np.uint32), dtype=np.uint32)

    def _round(self, block: Flat, codes: Codes, scratch: NDArray[np.float32]) -> None:
        bits, (rounded,) = block.view(np.uint32), scratch.view(np.uint32)
        np.right_shift(bits, _HALF, out=rounded)
        np.bitwise_and(rounded, _ONE, out=rounded)  # a tie goes up from an odd unit only
        np.add(rounded, self._below_half, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, _HALF, out=codes, casting="unsafe")


# Subnormals are rounded to the unit of this value. NumPy takes the maximum of two arrays several
# times faster than that of an array and a number.
_SMALLEST_NORMAL = np.full(BLOCK_SIZE, 2.0**-14, np.float32)
_FP16_VALUES: Flat = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
