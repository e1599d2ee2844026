"""What a trainer asks of an exchange, which turns gradients into parameters.

An exchange knows where the parameters live and who else trains them: parameter servers, or nobody
but this process. A trainer knows this file and no more, so it trains alike over all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from zmqtrain.compute.arrays import Flat
from zmqtrain.store.layout import ShardLayout


@dataclass(frozen=True, slots=True)
class Membership:
    """What a worker has once it has joined: its memory and its first batches.

    ``parameters`` and ``gradients`` are host arrays of shape (layout.size,), one for each of
    ``layouts``. The worker reads the first and writes the second while it computes a step. In
    between they belong to the exchange. ``stop``: the job needs no gradients.
    """

    layouts: Sequence[ShardLayout]
    parameters: Sequence[Flat]
    gradients: Sequence[Flat]
    batches: tuple[int, ...]
    stop: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """What was computed from one batch; the gradient itself lies in the membership's memory.

    ``loss`` is the mean over so many ``examples``. ``finite`` is False if the loss or the gradient
    holds NaN or infinity; then the gradient must not be used.
    """

    batch: int
    examples: int
    loss: float
    finite: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step's gradient, and what comes next.

    ``batches`` are further ones to compute. ``stop``: the job needs no more gradients. ``held_s``
    is how long the gradient waited for others.
    """

    result: Literal["applied", "accumulated", "dropped", "refused"]
    batches: tuple[int, ...] = ()
    stop: bool = False
    reason: str = ""
    held_s: float = 0.0


class Exchange(Protocol):
    """Where one worker's gradients go, and its parameters come from.

    A FencedError from any method says that the others do not know this worker any more: it has to
    join again. Every other error ends the training.
    """

    async def join(self) -> Membership:
        """Take part in the job, as a new member; return when the worker may compute."""
        ...

    def begin(self) -> None:
        """A step begins: the worker computes a gradient."""
        ...

    def written(self, names: Sequence[str]) -> None:
        """The gradients of these variables are complete, the rest of the step is not.

        Called from the thread that computes, between :meth:`begin` and :meth:`finish`.
        """
        ...

    def finish(self, report: StepReport) -> Awaitable[StepResult]:
        """Hand over the step's gradient; it is on its way when this returns.

        When the result is there, the parameters are those of the next step.
        """
        ...

    async def wait_for_end(self) -> None:
        """Wait until the job is over. FencedError: it needs this worker after all."""
        ...

    def leave(self, reason: str) -> None:
        """Take part no more, for a reason that people read; no step is under way."""
        ...
