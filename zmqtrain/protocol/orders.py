"""The decisions of the leader, which every shard carries out in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class Order:
    """One decision of the leader, which every shard carries out in the same order.

    ``workers``: those concerned (all contributors, in summing order, for reduce). ``text``: the
    reason of a drop, the spec of a switch, the directory of a snapshot, the learning rate ("": the
    optimizer's own). An admission answers the pull of a worker's life ``incarnation``, a release
    its push ``sequence``. A roster makes up to ``sequence`` steps by itself; ``batches``: the
    first that nobody was given.
    """

    kind: Literal[
        "apply", "accumulate", "reduce", "drop",
        "admit", "release", "switch", "snapshot", "leave", "rate", "roster",
    ]  # fmt: skip
    workers: tuple[int, ...] = ()
    text: str = ""
    incarnation: int = 0
    sequence: int = 0
    batches: tuple[int, ...] = ()
    stop: bool = False
