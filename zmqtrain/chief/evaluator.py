"""Measuring a job's model on its evaluation set: at intervals and at the end."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable

from zmqtrain.errors import ConfigError, DataError
from zmqtrain.job import Job
from zmqtrain.models.base import Dataset, Parameters
from zmqtrain.observe.metrics import Metrics
from zmqtrain.training.evaluation import evaluate

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
        self._next_step = job.evaluate_every or math.inf

    def is_due(self, step: int) -> bool:
        """Return whether the job's ``evaluate_every`` demands an evaluation at this global step."""
        return step >= self._next_step

    async def report(self, step: int) -> None:
        """Evaluate and log the result; training goes on if this fails."""
        every = self._job.evaluate_every
        self._next_step = (step // every + 1) * every
        try:
            loss, accuracy = await self.evaluate()
        except (ConfigError, DataError) as error:
            self._next_step = math.inf
            log.error("not evaluated at step %d, nor again before the end: %s", step, error)
        else:
            log.info("step %d: loss %.4f, accuracy %.4f", step, loss, accuracy)

    async def evaluate(self) -> tuple[float, float]:
        """Return (loss, accuracy) on the evaluation set, NaN where the model has none.

        Raises:
            ConfigError, DataError: the model or the dataset raises, or returns something wrong.
        """
        if self._dataset is None:
            return math.nan, math.nan
        parameters = await self._read_parameters(self._job.evaluate_average)
        cancelled = threading.Event()
        try:
            measures = await asyncio.to_thread(
                evaluate, self._job.model, parameters, self._dataset, cancelled.is_set
            )
        finally:
            cancelled.set()  # otherwise the process would wait for the thread
        loss, accuracy = measures.get("loss", math.nan), measures.get("accuracy", math.nan)
        self._metrics.evaluation_loss.set(loss)
        self._metrics.evaluation_accuracy.set(accuracy)
        return loss, accuracy
