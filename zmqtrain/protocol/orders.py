"""The leader's decisions, which every shard carries out in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(slots=True)
class Apply:
    """Apply the worker's gradient as one update; ``square``: see :class:`Reduce`.

    ``local_steps``: number of local steps whose result is applied instead, as one update that
    counts as all of these. It counts as one of ``among`` workers; ``cycle``: see optim/outer.py.
    """

    worker: int
    square: float | None = None
    local_steps: int = 0
    among: int = 0
    cycle: int = 0

    @property
    def workers(self) -> tuple[int, ...]:
        return (self.worker,)


@dataclass(slots=True)
class Accumulate:
    """Add the worker's gradient to the step's sum; the worker may then send another one."""

    worker: int

    @property
    def workers(self) -> tuple[int, ...]:
        return (self.worker,)


@dataclass(slots=True)
class Reduce:
    """Apply, as one update, the mean of the accumulated gradients and those of these workers.

    The gradients are summed in the order of ``workers``. ``square``: sum of squares of the mean on
    all shards, in the units of optim/norm.py; None if the norm is not limited, or if there is
    one shard. ``local_steps``: number of local steps of each worker whose results these are, and
    of steps that the update counts as; 0: they are gradients, and the update is one step.
    """

    workers: tuple[int, ...]
    square: float | None = None
    local_steps: int = 0


@dataclass(slots=True)
class Measure:
    """Report this shard's share in ``square`` of the next order, which is this update.

    ``number``: of measures in this generation. It is done once the update is.
    """

    update: Apply | Reduce
    number: int


@dataclass(slots=True)
class Drop:
    """Discard the worker's gradient; its batch is leased again."""

    worker: int
    reason: str


@dataclass(slots=True)
class Answer:
    """Answer push ``sequence`` of a worker's life, or its pull (0), with its next batches.

    ``stop``: the job needs no more of its gradients. ``local_steps``: number of local steps that
    it makes next, on the first of these batches; 0: it computes a gradient of the first one.
    ``sends_difference``: it pushes the difference that these steps make to its parameters.
    """

    worker: int
    incarnation: int
    sequence: int = 0
    batches: tuple[int, ...] = ()
    stop: bool = False
    local_steps: int = 0
    sends_difference: bool = False


@dataclass(slots=True)
class Switch:
    """Use this policy from here on."""

    policy: str


@dataclass(slots=True)
class Snapshot:
    """Write the shard, as it is now, into the directory of a checkpoint."""

    directory: str


@dataclass(slots=True)
class Rate:
    """Use this learning rate from here on; None: the optimizer's own."""

    learning_rate: float | None


@dataclass(slots=True)
class Roster:
    """Let these workers, in this order, make up to ``steps`` steps without the leader.

    ``next_batch``: the first batch that no worker has.
    """

    workers: tuple[int, ...]
    steps: int
    next_batch: int


Order: TypeAlias = (
    Apply | Accumulate | Reduce | Measure | Drop | Answer | Switch | Snapshot | Rate | Roster
)  # fmt: skip

Numbered: TypeAlias = tuple[int, Order]
"""An order with its number; 0: the shard's own order."""
