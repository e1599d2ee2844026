"""Changes of a round of local steps, encoded once for all workers that receive them by tcp.

A worker adds it to the parameters that it has. So that the shard has the same bits, it moves its
own parameters to what the workers get; what the encoding leaves out is kept in a slot, and is part
of the next difference. The encoded difference is in private memory alone: a worker that has other
parameters, or asks a restarted ps, gets all of them, and they have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.outer import RESIDUAL
from zmqtrain.protocol.orders import Order
from zmqtrain.store.finite import all_finite
from zmqtrain.store.shard import Shard
from zmqtrain.wire import chunks
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.compression import Compression, Compressor, Decompressor


class Differences:
    """Carries out the rounds of a shard, and keeps the changes of the last one."""

    def __init__(self, shard: Shard, compression: Compression) -> None:
        self._shard = shard
        self._compression = compression
        self._of = -1, -1  # versions before the last round and after it
        self._encoded: list[tuple[Tensor, ...]] = []  # by chunk

    def carry_out(self, order: Order, number: int) -> object:
        """Carry out a round; then encode what it has changed, and settle there.

        Raises:
            ConfigError: as :meth:`Shard.carry_out`.
        """
        shard = self._shard
        target, version = shard.parameters[: shard.layout.trained].copy(), shard.version
        self._encoded = []
        outcome = shard.carry_out(order, number)
        whole = shard.parameters.copy()  # becomes the difference, behind it the state
        trained = whole[: len(target)]
        with np.errstate(all="ignore"):  # a job that diverges goes on until it is stopped
            np.subtract(trained, target, out=trained)
            if (residual := shard.segment.slots.get(RESIDUAL)) is not None:
                np.add(trained, residual[: len(target)], out=trained)
        if all_finite(trained):
            encoded = self._encode(whole, target)
            shard.settle(target)
            self._encoded, self._of = encoded, (version, shard.version)
        return outcome

    def forget(self) -> None:
        """Forget the last round: other parameters may get its version."""
        self._encoded = []

    def since(self, version: int) -> Callable[[int, Flat], tuple[Tensor, ...]] | None:
        """Return an encoder of the difference since a version; None: there is none."""
        encoded = self._encoded
        if not encoded or self._of != (version, self._shard.version):
            return None
        return lambda start, _: encoded[start // chunks.CHUNK_SIZE]

    def _encode(self, whole: Flat, target: Flat) -> list[tuple[Tensor, ...]]:
        """Return the encoded chunks of a difference, having added them to ``target``."""
        size, encoded = len(target), []
        encode = Compressor(self._compression, size, keeps=False).encode
        decode = Decompressor(self._compression, size).decode
        for index in range(chunks.count(len(whole))):
            start, chunk = index * chunks.CHUNK_SIZE, chunks.at(whole, index)
            encoded.append(encode(start, chunk))
            decode(start, encoded[-1], chunk)
            moved = target[start : start + len(chunk)]
            np.add(moved, chunk[: len(moved)], out=moved)
        return encoded
