"""Measuring a job's model on its evaluation set: at intervals and at the end."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from zmqtrain.data.subset import first_of
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.job import Job
from zmqtrain.metrics import Measures, numbers
from zmqtrain.models.base import Dataset, Parameters
from zmqtrain.observe.metrics import Metrics
from zmqtrain.training.evaluation import ROWS, evaluate

log = logging.getLogger(__name__)


class Evaluator:
    """The evaluations of one job."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset | None,
        metrics: Metrics,
        read_parameters: Callable[[bool], Awaitable[Parameters]],
    ) -> None:
        """``dataset``: the evaluation set; without one nothing is measured.

        ``read_parameters`` returns the current parameters or, given True, their moving averages.
        """
        self._job, self._dataset, self._metrics = job, dataset, metrics
        self._read_parameters = read_parameters
        self.is_done = not job.evaluate_every  # until the end
        self._last: tuple[int, Measures] | None = None  # of which step, and what
        self._found: dict[int, Measures] = {}

    def is_due(self, step: int) -> bool:
        """Return whether the job's ``evaluate_every`` demands an evaluation at this global step."""
        is_last = self._last is not None and self._last[0] == step
        return not (self.is_done or is_last or not step or step % self._job.evaluate_every)

    async def report(self, step: int, parameters: Parameters | None = None) -> None:
        """Evaluate and log the result; training goes on if this fails."""
        try:
            measures = await self.evaluate(step, parameters)
        except (ConfigError, DataError) as error:
            self.is_done = True
            log.error("not evaluated at step %d, nor again before the end: %s", step, error)
        else:
            log.info("step %d: %s", step, shown(measures))

    def names(self) -> list[str]:
        """Return the names of all measures, which those of one example are.

        Raises:
            ConfigError, DataError: as for :meth:`evaluate`.
        """
        if self._dataset is None or not len(self._dataset):
            return []
        job = self._job
        one = first_of(self._dataset, 1)
        return list(evaluate(job.model, job.all_values(), one, metrics=job.metrics))

    async def check(self) -> None:
        """Measure one example if the job has metrics, so that one that does not fit is known soon.

        Epochs do so by themselves, for they have to know the names.

        Raises:
            ConfigError, DataError: as for :meth:`evaluate`.
        """
        if self._job.metrics and not self._job.epochs:
            await asyncio.to_thread(self.names)

    def forget(self) -> None:
        """The parameters were replaced, perhaps by those of an earlier step."""
        self._last = None

    async def evaluate(self, step: int, parameters: Parameters | None = None) -> Measures:
        """Return what is measured on the evaluation set at this step; {} without one.

        ``parameters``: of this step, or their moving averages; None: the current ones.

        Raises:
            ConfigError, DataError: the model or the dataset raises, or returns something wrong.
        """
        if self._dataset is None:
            return {}
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        if parameters is None:
            parameters = await self._read_parameters(self._job.evaluate_average)
        cancelled = threading.Event()
        try:
            measures = await asyncio.to_thread(
                evaluate,
                self._job.model,
                parameters,
                self._dataset,
                cancelled.is_set,
                self._job.metrics,
                min(ROWS, 4 * self._job.batch_size),  # what a step of training has room for
            )
        finally:
            cancelled.set()  # otherwise the process would wait for the thread
        self._metrics.evaluation_loss.set(measures.get("loss", math.nan))
        self._metrics.evaluation_accuracy.set(measures.get("accuracy", math.nan))
        self._last = step, measures
        # A job that went back to a checkpoint measures those steps anew.
        while self._found and next(reversed(self._found)) >= step:
            self._found.popitem()
        self._found[step] = measures
        return measures

    @property
    def evaluations(self) -> tuple[dict[str, Any], ...]:
        """The step and the measures of each evaluation."""
        return tuple({"step": step} | measures for step, measures in self._found.items())


def shown(measures: Measures) -> str:
    """Return the measures that are numbers, in one line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in numbers(measures).items())
