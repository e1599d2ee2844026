"""Connects the trainer to the thread of the user's own training loop, batch by batch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

from zmqtrain.errors import ExitCode, FencedError, PeerLostError, ZmqTrainError
from zmqtrain.models.base import (
    Batch,
    Buffers,
    Dataset,
    Gradients,
    Parameters,
    Wrapped,
    absent,
    as_model,
    measured,
)
from zmqtrain.models.rows import InitialRows, RowSource
from zmqtrain.models.tables import Ids, Rows, TableVariable


class LoopEndedError(ZmqTrainError):
    """The user's loop has ended before the job; its current batch is not counted."""

    exit_code = ExitCode.ORPHANED


class Lease(NamedTuple):
    """A batch, and the memory for its gradient; ``seed`` is that of the job."""

    parameters: Parameters
    batch: Batch
    out: Gradients
    seed: int
    number: int


class Place(NamedTuple):
    """The worker's place in its job; the defaults are those of a task that computes nothing."""

    worker: int | None = None
    workers: int = 0
    evaluation: Dataset | None = None
    version: Callable[[], int] = int  # returns the global step
    save: Callable[[], Coroutine[Any, Any, str | None]] | None = None  # returns a checkpoint's path
    events: asyncio.AbstractEventLoop | None = None  # of ``save``


class RowsOfLoop(RowSource):
    """The rows that the user's own loop reads, without errors of a lost ps.

    The rows are those before any training then. The gradient that is computed from them does not
    count: the trainer's thread meets the same error when it sends the gradient.
    """

    def __init__(self, rows: RowSource, tables: Sequence[TableVariable]) -> None:
        self._rows, self._tables = rows, tables

    @property
    def may_wait(self) -> bool:
        return self._rows.may_wait

    def read(self, wanted: Sequence[tuple[int, Ids]]) -> list[Rows]:
        try:
            return self._rows.read(wanted)
        except (FencedError, PeerLostError):
            return InitialRows(self._tables).read(wanted)

    def exact(self) -> RowSource:
        """Return the rows for an evaluation, which raises the error of a lost ps."""
        return self._rows.exact()

    def close(self) -> None:
        self._rows.close()


class LoopBridge(Wrapped):
    """A model whose gradients the thread of the user's loop computes.

    The trainer's thread calls ``loss_and_gradients``, which waits for that thread.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(as_model(model))
        self._evaluated = as_model(copy.deepcopy(model))  # the loop may use the other one meanwhile
        self._seed = 0, 0
        self._out: Gradients = {}  # the trainer's, and as the loop gets it
        self._plain = Buffers({})
        self._leases: SimpleQueue[Lease | None] = SimpleQueue()
        self._losses: SimpleQueue[float | LoopEndedError] = SimpleQueue()
        self._means: Mapping[str, float] = {}  # the measures of the last step
        self.place = Place()

    def __deepcopy__(self, memo: dict[int, Any]) -> LoopBridge:
        return self  # there is one loop, and it has a copy for evaluations

    def make_tables(self, patterns: Sequence[Any]) -> None:
        self._model.make_tables(patterns)
        self._evaluated.make_tables(patterns)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return self._evaluated.metrics(parameters, batch)

    def predict(self, parameters: Parameters, batch: Batch) -> Any:
        return self._evaluated.predict(parameters, batch)

    def seed_batch(self, seed: int, batch: int) -> None:
        self._seed = seed, batch

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        # Without callbacks: the loop may call backward() several times, so gradients are complete
        # only at its step.
        if out is not self._out:
            self._out, self._plain = out, Buffers(out)
        self._plain.absent.clear()
        self._leases.put(Lease(parameters, batch, self._plain, *self._seed))
        loss = self._losses.get()
        if isinstance(loss, LoopEndedError):
            raise loss
        absent(out, *self._plain.absent)
        measured(out, None, self._means)
        return loss

    def next(self) -> Lease | None:
        """Wait for the trainer's next batch; return None if there is no other.

        The loop may then read the module, and change it if this worker trains alone.
        """
        lease = self._leases.get()
        if lease is None:
            self._leases.put(None)  # for another call
        else:
            self._model.hold(lease.parameters, lease.out)
        return lease

    def start(self, lease: Lease) -> Any:
        """Begin the step of a batch; return the values that the loop gets."""
        self._model.seed_batch(lease.seed, lease.number)
        return self._model.begin(lease.parameters, lease.batch, lease.out)

    def stepped(self, loss: float, means: Mapping[str, float]) -> None:
        """End the step of the last batch, whose gradient is in its memory, with its measures."""
        self._means = means
        self._losses.put(loss)

    def end_leases(self) -> None:
        """End the loop's batches: the trainer has ended."""
        self._leases.put(None)

    def end_loop(self) -> None:
        """End the trainer's step: the user's loop has ended."""
        self._losses.put(LoopEndedError("the training loop has ended before the job"))
