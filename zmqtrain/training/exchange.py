"""The interface between the training loop and an exchange, which turns gradients into parameters.

The parameters are on parameter servers or in this process; the loop knows this interface alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

from zmqtrain.compute.arrays import Flat
from zmqtrain.metrics.sums import added
from zmqtrain.models.rows import RowSource
from zmqtrain.models.tables import Ids, RowsOf
from zmqtrain.models.weights import weight_of, weighted_mean
from zmqtrain.store.layout import ShardLayout


@dataclass(frozen=True, slots=True)
class Round:
    """Local steps: the worker updates parameters of its own with its next ``batches``.

    It sends these parameters then, in the place of a gradient; see optim/outer.py. ``step``: the
    global step that is the first of them. ``learning_rate``: in place of the optimizer's.
    ``sends_difference``: it sends the difference to the common parameters instead.
    """

    step: int
    batches: int
    learning_rate: float | None = None
    sends_difference: bool = False


@dataclass(frozen=True, slots=True)
class Membership:
    """The memory and the first batches of a worker that has joined.

    ``parameters`` and ``gradients`` are host arrays of shape (layout.size,), one for each of
    ``layouts``; slices that are copies are written, but never read. During a step the worker reads
    the parameters and writes the gradients. Between steps both belong to the exchange.
    ``byte_state``: a private copy of the state that is encoded as bytes; () if parameters do not
    change during a step. ``stop``: the job needs no gradients.
    ``is_own``: no other task has these parameters, so the model's writes to them count.
    ``rows``: where the rows of the job's tables are read; None: it has none.
    ``round``: that begins; None: the worker sends a gradient for each batch.
    """

    layouts: Sequence[ShardLayout]
    parameters: Sequence[Flat]
    gradients: Sequence[Flat]
    batches: tuple[int, ...]
    stop: bool = False
    byte_state: Sequence[Flat] = ()
    is_own: bool = False
    rows: RowSource | None = None
    round: Round | None = None


@dataclass(slots=True)
class StepReport:
    """The result of one batch, or of a round; the gradient itself is in the membership's memory.

    ``loss`` is the mean over ``examples``, and ``weight`` that of loss and gradient; None: the
    number of examples. ``finite`` is False if the loss or the gradient holds
    NaN or infinity; then the gradient must not be used. ``sums``: of other measures, over the
    examples; see :mod:`zmqtrain.training.measuring`. ``absent``: names of the variables that have
    no gradient; it is zero. ``rows``: the gradient of each table's rows, at most one of a table.
    ``batches``: of a round, of which ``batch`` is the first. ``ahead``: (table, sorted unique ids)
    of the rows that the next step is expected to read.
    """

    batch: int
    examples: int
    loss: float
    finite: bool
    sums: dict[str, float] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    weight: float | None = None
    rows: tuple[RowsOf, ...] = ()
    batches: int = 1
    ahead: Sequence[tuple[int, Ids]] = ()

    @classmethod
    def of(cls, parts: Sequence[StepReport]) -> StepReport:
        """Return the report of batches that count together, without gradients of rows."""
        weights = [weight_of(part) for part in parts]
        return cls(
            batch=parts[0].batch,
            examples=sum(part.examples for part in parts),
            loss=weighted_mean([part.loss for part in parts], weights),
            finite=all(part.finite for part in parts),
            sums=reduce(added, [part.sums for part in parts]),
            absent=frozenset.intersection(*[part.absent for part in parts]),
            weight=sum(weights),
            batches=len(parts),
        )


@dataclass(slots=True)
class StepResult:
    """The result of a step's gradient, and the next batches.

    ``batches``: numbers of further batches to compute. ``stop``: the job needs no more gradients.
    ``held_s``: time that the gradient waited for others. ``update_s``: time of this worker's own
    update of parameters. ``round``: as in :class:`Membership`. ``step``: the global step after it,
    None if an answer that stops the worker has no parameters. ``sequence``: the push's; 0: none.
    """

    result: Literal["applied", "accumulated", "dropped", "refused"]
    batches: tuple[int, ...] = ()
    stop: bool = False
    reason: str = ""
    held_s: float = 0.0
    update_s: float = 0.0
    round: Round | None = None
    step: int | None = 0
    sequence: int = 0


class Exchange(ABC):
    """Sends one worker's gradients and receives its parameters.

    Every method may raise FencedError: the worker is no longer a member and has to join again.
    Every other error ends the training.
    """

    @abstractmethod
    async def join(self) -> Membership:
        """Join the job as a new member; return when the worker may compute."""

    def begin(self) -> None:
        """Begin a step: the worker computes a gradient."""

    def written(self, names: Sequence[str]) -> None:
        """Report that the gradients of these variables are complete, before the step is.

        Called from the thread that computes, between :meth:`begin` and :meth:`finish`.
        """

    @abstractmethod
    def finish(self, report: StepReport) -> Awaitable[StepResult]:
        """Send the step's gradient; sending has begun when this returns.

        When the result is there, the parameters are those of the next step.
        """

    @abstractmethod
    async def wait_for_end(self) -> None:
        """Wait until the job is over. FencedError: the job needs this worker again."""

    @abstractmethod
    def leave(self, reason: str) -> None:
        """Leave the job; no step is under way. ``reason`` is for people."""
