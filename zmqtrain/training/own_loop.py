"""A training loop of the user's own: at each batch, the trainer meets the thread that runs it."""

from __future__ import annotations

import copy
from queue import SimpleQueue
from typing import Any, NamedTuple

from zmqtrain.errors import ExitCode, ZmqTrainError
from zmqtrain.models.base import Batch, Gradients, Parameters, Wrapped, as_model


class LoopEndedError(ZmqTrainError):
    """The user's loop has ended before the job; the batch that it held is not counted."""

    exit_code = ExitCode.ORPHANED


class Lease(NamedTuple):
    """A batch, and the memory for its gradient; ``seed`` is that of the job."""

    parameters: Parameters
    batch: Batch
    out: Gradients
    seed: int
    number: int


class Meeting(Wrapped):
    """A model whose gradients another thread computes; all else is the model's own.

    The trainer's thread calls ``loss_and_gradients``, which waits for the other one.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(as_model(model))
        self._evaluated = as_model(copy.deepcopy(model))  # the loop may use the other one then
        self._seed = 0, 0
        self._out: Gradients = {}  # the trainer's, and as the loop gets it
        self._plain: Gradients = {}
        self._leases: SimpleQueue[Lease | None] = SimpleQueue()
        self._losses: SimpleQueue[float | LoopEndedError] = SimpleQueue()

    def __deepcopy__(self, memo: dict[int, Any]) -> Meeting:
        return self  # there is one loop, and it has a copy for evaluations

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return self._evaluated.metrics(parameters, batch)

    def predict(self, parameters: Parameters, batch: Batch) -> Any:
        return self._evaluated.predict(parameters, batch)

    def seed_batch(self, seed: int, batch: int) -> None:
        self._seed = seed, batch

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        # A plain dict: the loop may call backward() several times, so gradients are complete only
        # at its step.
        if out is not self._out:
            self._out, self._plain = out, dict(out)
        self._leases.put(Lease(parameters, batch, self._plain, *self._seed))
        loss = self._losses.get()
        if isinstance(loss, LoopEndedError):
            raise loss
        return loss

    def next(self) -> Lease | None:
        """Wait for the next batch of the trainer; None if there will be no more.

        The loop may then look at the module, and change what it trains alone.
        """
        lease = self._leases.get()
        if lease is None:
            self._leases.put(None)  # for whoever asks again
        else:
            self._model.hold(lease.parameters, lease.out)
        return lease

    def start(self, lease: Lease) -> Any:
        """Begin the step of a batch; return what the loop is given."""
        self._model.seed_batch(lease.seed, lease.number)
        return self._model.begin(lease.parameters, lease.batch, lease.out)

    def stepped(self, loss: float) -> None:
        """End the step of the last batch: its gradient is in its memory."""
        self._losses.put(loss)

    def end_leases(self) -> None:
        """The trainer has ended."""
        self._leases.put(None)

    def end_loop(self) -> None:
        """The user's loop has ended: the trainer gets no more gradients."""
        self._losses.put(LoopEndedError("the training loop has ended before the job"))
