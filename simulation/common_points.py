"""Whether all workers compute on the same parameters: what each reads by tcp, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from zmqtrain.exchanges.worker import Worker

Place = tuple[int, ...]
"""Shard, generation, life of the chief that began it, version."""


class CommonPoints:
    """The parameters of each version, as the first worker that pushed had them."""

    def __init__(self, object_to: Callable[[str], None]) -> None:
        self._object = object_to
        self._known: dict[Place, tuple[str, bytes]] = {}

    def check(self, worker: Worker, began_by: Callable[[int, int], int]) -> None:
        """Compare the parameters of a worker that is about to push.

        ``began_by``: the life of the chief that began this generation of a shard.
        """
        exchange = worker.exchange
        lanes: Iterable[int] = range(len(exchange.lanes)) if exchange is not None else ()
        for shard in lanes:
            assert exchange is not None
            lane, version = exchange.lanes[shard], exchange.versions[shard]
            if lane.reached is not None:
                continue
            generation = worker.generation
            place = shard, generation, began_by(shard, generation), version
            name = f"worker {worker.task.index}"
            mine = hashlib.sha256(lane.parameters.tobytes()).digest()
            first, expected = self._known.setdefault(place, (name, mine))
            if mine != expected:
                self._object(f"{name} and {first} have unlike parameters of ps {shard} at {place}")
