"""The events of a job. The leader writes each into its journal, then decides on it.

Some requests are events: see wire/messages.py. Equal events after equal states give equal orders.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zmqtrain.metrics.sums import gained
from zmqtrain.models.weights import weight_of
from zmqtrain.wire.control import Close, Extend, Save, SetRate, SwitchPolicy
from zmqtrain.wire.messages import Arrived


@dataclass(slots=True)
class Joined:
    """A new life of a worker begins; it takes part once its pull has arrived."""

    worker: int
    incarnation: int


@dataclass(slots=True)
class Left:
    """A worker has left, or its lease expired."""

    worker: int


@dataclass(slots=True)
class PullArrived:
    """A worker that has joined asks to begin.

    ``on_board``: it has the shard mapped, so it can be in a roster.
    """

    worker: int
    on_board: bool = False


@dataclass(slots=True)
class PushArrived:
    """Push ``sequence`` of a worker's life has arrived on shard 0.

    It was computed from ``batch``, of ``examples`` examples with this mean ``loss``. ``finite``:
    whether this part is. ``sums``: sums of other measures. ``weight``: that of the loss; None: the
    number of examples. ``batches``: number of its leases that count, beginning with ``batch``.
    """

    worker: int
    sequence: int
    batch: int
    examples: int = 0
    finite: bool = True
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    weight: float | None = None
    batches: int = 1

    @classmethod
    def of(cls, worker: int, sequence: int, step: Any) -> PushArrived:
        """Return the arrival of a step: its report, or the push of it."""
        return cls(
            worker=worker,
            sequence=sequence,
            batch=step.batch,
            examples=step.examples,
            finite=step.finite,
            loss=step.loss,
            sums=step.sums,
            weight=step.weight,
            batches=step.batches,
        )


@dataclass(slots=True)
class PushesReported:
    """Parts of pushes have arrived on another shard."""

    shard: int
    arrived: Arrived


@dataclass(slots=True)
class Stepped:
    """A roster has made ``steps`` steps since it began, of ``examples`` with this sum of losses.

    ``weight``: the sum of their weights; None: the number of examples. ``sums``: of the other
    measures. ``over``: there will be no more steps. ``losses``: the last one of each worker.
    """

    steps: int
    examples: int
    loss: float
    over: bool
    sums: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    weight: float | None = None

    def since(self, before: Stepped) -> Stepped:
        """Return the steps after those of an earlier event of this roster."""
        return Stepped(
            steps=self.steps - before.steps,
            examples=self.examples - before.examples,
            loss=self.loss - before.loss,
            over=self.over,
            sums=gained(self.sums, before.sums),
            losses=self.losses,
            weight=weight_of(self) - weight_of(before),
        )


@dataclass(slots=True)
class Measured:
    """A shard has carried out Measure ``number``: its share in ``square`` of the update."""

    shard: int
    number: int
    square: int


@dataclass(slots=True)
class GivenUp:
    """The run cannot go on, for this reason; later pushes do not count."""

    exit_code: int = 0
    reason: str = ""


Event: TypeAlias = (
    PushArrived | PushesReported | PullArrived | Stepped | Measured | Joined | Left
    | SwitchPolicy | Save | Close | Extend | SetRate | GivenUp
)  # fmt: skip
