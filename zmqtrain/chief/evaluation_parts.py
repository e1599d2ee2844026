"""An evaluation in parts: the chief measures them, and workers that stand still measure some, too.

The chief waits for no worker: when no part is left, it measures those that it has lent.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from zmqtrain.actors.actor import Request
from zmqtrain.exchanges.evaluations import received_sums
from zmqtrain.job import Job
from zmqtrain.metrics import Metric
from zmqtrain.training.evaluation import PartSums
from zmqtrain.wire.control import Evaluate, Evaluated

AHEAD = 2  # parts that a worker has: one that it measures, and the next


class EvaluationParts:
    """The parts of one evaluation: measured, lent to a worker, or free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(count))
        self._lent: dict[int, int] = {}  # to which worker, the longest ago first
        self._sums: dict[int, PartSums] = {}

    def next(self) -> int | None:
        """Return the part that the chief measures next; None: all are measured."""
        if self._free:
            return self._free.popleft()
        return next((part for part in self._lent if not self.is_measured(part)), None)

    def lend(self, worker: int, count: int) -> tuple[int, ...]:
        """Lend at most ``count`` parts to a worker, and return them."""
        parts = tuple(self._free.pop() for _ in range(min(count, len(self._free))))
        self._lent.update(dict.fromkeys(parts, worker))
        return parts

    def holder(self, part: int) -> int | None:
        """Return the worker that was lent this part, if any was."""
        return self._lent.get(part)

    def is_measured(self, part: int) -> bool:
        return part in self._sums

    def add(self, part: int, sums: PartSums) -> None:
        """Add the sums of a part; the first ones count."""
        self._sums.setdefault(part, sums)

    def total(self, metrics: Sequence[Metric]) -> PartSums:
        """Return the sums of all parts, added in their order.

        Raises:
            ConfigError: the sums of a metric have different shapes.
        """
        total = PartSums(metrics)
        for part in range(self.count):
            total.add(self._sums[part])
        return total


class EvaluationWorkers:
    """The workers that measure parts of the evaluation that is under way."""

    def __init__(
        self, job: Job, send: Callable[[Evaluate], None], workers: Callable[[], Iterable[int]]
    ) -> None:
        """``workers`` returns the workers that may be asked now."""
        self._job, self._send, self._workers = job, send, workers
        self._wanted = Evaluate(0, "")  # by the evaluation under way, but for worker and parts
        self._parts = EvaluationParts(0)
        self._asked: list[int] = []

    def begin(self, parts: EvaluationParts, step: int, data: str) -> None:
        """Give parts to workers. ``step``: the parameters' step; ``data`` describes the data."""
        self._parts, self._asked = parts, list(self._workers())
        self._wanted = Evaluate(0, secrets.token_hex(8), step, self._job.evaluate_average, data)
        for worker in self._asked:
            self._lend(worker, AHEAD)

    def end(self) -> None:
        """Have the workers stop: the evaluation is over, or given up."""
        for worker in self._asked:
            self._send(Evaluate(worker, self._wanted.evaluation))
        self._parts, self._asked = EvaluationParts(0), []

    def on_evaluated(self, request: Request, message: Evaluated) -> None:
        worker = self._parts.holder(message.part)
        if worker is None or message.evaluation != self._wanted.evaluation:
            return  # it comes too late
        tensors = request.envelope.tensors
        sums = received_sums(self._job.metrics, message, tensors)
        self._parts.add(message.part, sums)
        self._lend(worker, 1)

    def _lend(self, worker: int, count: int) -> None:
        if parts := self._parts.lend(worker, count):
            self._send(replace(self._wanted, worker=worker, parts=parts))
