"""The contract of a compression, and a helper for decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import Tensor


@runtime_checkable
class Compression(Protocol):
    """The encoding of one chunk of a gradient.

    It holds no state, so one object serves any number of chunks and threads.
    """

    @property
    def spec(self) -> str:
        """The text that makes this compression, defaults filled in: equal texts, equal bytes."""

    @property
    def feedback(self) -> bool:
        """Whether the loss of encoding must be added to the next gradient."""

    @property
    def tensors(self) -> int:
        """Number of tensors that ``encode`` returns."""

    def of_rows(self, dim: int) -> Compression | None:
        """Return the compression of rows with ``dim`` elements; None: they are sent as they are.

        Its loss for a row does not depend on other rows, and is not fed back.
        """

    def encode(self, chunk: Flat) -> tuple[Tensor, ...]:
        """Return the encoded ``chunk``, in new memory; it is only read, and must be finite."""

    def decode(self, tensors: Sequence[Tensor], out: Flat) -> None:
        """Overwrite all of ``out`` with the chunk that ``tensors`` were made from, less the loss.

        Values that are not finite are passed on where the code can express them: whether a
        gradient is finite is for its receiver to check.

        Raises:
            ProtocolError: no chunk of ``out``'s size has such tensors; ``out`` is as it was.
        """


def received(
    compression: Compression,
    tensors: Sequence[Tensor],
    size: int,
    *expected: tuple[str, tuple[int, ...]],
) -> list[NDArray[Any]]:
    """Return the values of a peer's tensors of the expected dtypes and shapes.

    The arrays are read-only and may be unaligned: they are views of frames where possible.

    Raises:
        ProtocolError: number, dtype or shape of the tensors are others.
    """
    got = [(tensor.dtype, tensor.shape) for tensor in tensors]
    if got != list(expected):
        raise ProtocolError(
            f"got {_described(got)}, expected {_described(expected)} for {size} elements in "
            f"compression {compression.spec}: both tasks must run the same job"
        )
    return [_view(tensor) for tensor in tensors]


def _described(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return " and ".join(f"{dtype} {list(shape)}" for dtype, shape in tensors) or "no tensor"


def _view(tensor: Tensor) -> NDArray[Any]:
    if len(tensor.parts) == 1:
        return np.frombuffer(tensor.parts[0], tensor.dtype).reshape(tensor.shape)
    return tensor.array()
