"""A training loop of the user's own: at each batch, the trainer meets the thread that runs it."""

from __future__ import annotations

import copy
from queue import SimpleQueue
from typing import Any, NamedTuple

from zmqtrain.errors import ConfigError, ExitCode, ZmqTrainError
from zmqtrain.models.base import Batch, Gradients, Parameters


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


class Meeting:
    """A model whose gradients another thread computes; all else is the model's own.

    The trainer's thread calls ``loss_and_gradients``, which waits for the other one.
    """

    def __init__(self, model: Any) -> None:
        """
        Raises:
            ConfigError: the model cannot be used in a loop of the user's own.
        """
        if not (hasattr(model, "begin") and hasattr(model, "finish")):
            raise ConfigError(
                f"{model!r} cannot be trained in a loop of your own; expected the model of an "
                "adapter, such as zmqtrain.adapters.torch.TorchModel; or use zmqtrain.run"
            )
        self._model = model
        self._evaluated = copy.deepcopy(model)  # the loop may use the other one at the same time
        self._seed = 0, 0
        self._out: Gradients = {}  # the trainer's, and as the loop gets it
        self._plain: Gradients = {}
        self._leases: SimpleQueue[Lease | None] = SimpleQueue()
        self._losses: SimpleQueue[float | LoopEndedError] = SimpleQueue()

    def __repr__(self) -> str:
        return repr(self._model)  # all tasks have the same fingerprint

    def __deepcopy__(self, memo: dict[int, Any]) -> Meeting:
        return self  # there is one loop, and it has a copy for evaluations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._evaluated if name == "predict" else self._model, name)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        measures: dict[str, float] = self._evaluated.metrics(parameters, batch)
        return measures

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
        elif hasattr(self._model, "show"):
            self._model.show(lease.parameters, lease.out)
        return lease

    def begin(self, lease: Lease) -> Any:
        """Begin the step of a batch; return what the loop is given."""
        if hasattr(self._model, "seed_batch"):
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
