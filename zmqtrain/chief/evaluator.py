"""Measuring a job's model on its evaluation set: at intervals and at the end."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from zmqtrain.chief.evaluation_parts import EvaluationParts, EvaluationWorkers
from zmqtrain.compute.offload import in_daemon
from zmqtrain.data.description import describe
from zmqtrain.data.subset import first_of
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.job import Job
from zmqtrain.metrics import Measures, numbers
from zmqtrain.models.base import Dataset, Parameters
from zmqtrain.models.rows import readers_of
from zmqtrain.observe.metrics import Metrics
from zmqtrain.training.evaluation import PartSums, evaluate, measure, parts_of, rows_of
from zmqtrain.units import measures_text

log = logging.getLogger(__name__)


class Evaluator:
    """The evaluations of one job."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset | None,
        metrics: Metrics,
        read_parameters: Callable[[bool], Awaitable[Parameters]],
        tables: Callable[[], Parameters] = dict,
        workers: EvaluationWorkers | None = None,
    ) -> None:
        """``dataset``: the evaluation set; without one nothing is measured.

        ``read_parameters`` returns the current parameters or, given True, their moving averages;
        ``tables`` readers of the current rows. ``workers`` measure parts, too, while none trains.
        """
        self._job, self._dataset, self._metrics = job, dataset, metrics
        self._read_parameters, self._workers = read_parameters, workers
        self._tables = tables
        self._described: str | None = None  # the data set, once it was needed
        self.is_done = not job.evaluate_every  # until the end
        self._last: tuple[int, Measures] | None = None  # its step and its measures
        self._found: dict[int, Measures] = {}
        self.reported: list[tuple[int, Measures]] = []  # by :meth:`report`, for callbacks to see

    def is_due(self, step: int) -> bool:
        """Return whether the job's ``evaluate_every`` demands an evaluation at this global step."""
        is_last = self._last is not None and self._last[0] == step
        return not (self.is_done or is_last or not step or step % self._job.evaluate_every)

    async def report_if_due(self, step: int) -> None:
        """Evaluate and log the result if this step demands it and is not the last one."""
        if self.is_due(step) and step < self._job.steps:
            await self.report(step)

    async def report(self, step: int, parameters: Parameters | None = None) -> None:
        """Evaluate and log the result; training goes on if this fails."""
        try:
            measures = await self.evaluate(step, parameters)
        except (ConfigError, DataError) as error:
            self.is_done = True
            log.error("evaluation at step %d failed, disabled until the end: %s", step, error)
        else:
            log.info("step %d: %s", step, shown(measures))
            self.reported.append((step, measures))

    def names(self) -> list[str]:
        """Return the names of all measures, which those of the first examples are.

        Raises:
            ConfigError, DataError: as for :meth:`evaluate`.
        """
        if self._dataset is None:
            return []
        job = self._job
        some = first_of(self._dataset, rows_of(job.batch_size))
        values = job.all_values() | readers_of(job.table_variables())
        return list(evaluate(job.model, values, some, metrics=job.metrics))

    async def check(self) -> None:
        """Measure some examples, so that what cannot be evaluated is known before training.

        Epochs do so by themselves, for they have to know the names.

        Raises:
            ConfigError, DataError: as for :meth:`evaluate`.
        """
        if not self._job.has_epochs:
            await in_daemon(self.names)

    def forget(self) -> None:
        """The parameters were replaced, perhaps by those of an earlier step."""
        self._last = None

    async def evaluate(self, step: int, parameters: Parameters | None = None) -> Measures:
        """Return the measures of the evaluation set at this step; {} without one.

        ``parameters``: of this step, or their moving averages, and readers of tables unless these
        are current; None: the current ones, which do not change.

        Raises:
            ConfigError, DataError: the model or the dataset raises, or returns something wrong.
        """
        if self._dataset is None:
            return {}
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        workers = self._workers if parameters is None else None
        if parameters is None:
            parameters = await self._read_parameters(self._job.evaluate_average)
        measures = await self._measure(self._dataset, step, parameters, workers)
        self._metrics.evaluation_loss.set(measures.get("loss", math.nan))
        self._metrics.evaluation_accuracy.set(measures.get("accuracy", math.nan))
        self._last = step, measures
        # A job that went back to a checkpoint measures those steps anew.
        while self._found and next(reversed(self._found)) >= step:
            self._found.popitem()
        self._found[step] = measures
        return measures

    async def _measure(
        self, dataset: Dataset, step: int, parameters: Parameters, workers: EvaluationWorkers | None
    ) -> Measures:
        parameters = {**self._tables(), **parameters}
        examples = parts_of(len(dataset), rows_of(self._job.batch_size))
        parts = EvaluationParts(len(examples))
        part = parts.next()
        try:
            if workers is not None and parts.count > 1:
                workers.begin(parts, step, await self._description(dataset))
            while part is not None:
                is_measured = partial(parts.is_measured, part)
                sums = await self._measure_part(dataset, parameters, examples[part], is_measured)
                if sums is not None:
                    parts.add(part, sums)
                part = parts.next()
        finally:
            if workers is not None:
                workers.end()
        if not parts.count:
            return {}
        return parts.total(self._job.metrics).results(len(dataset), self._job.model)

    async def _measure_part(
        self,
        dataset: Dataset,
        parameters: Parameters,
        examples: range,
        is_measured: Callable[[], bool],
    ) -> PartSums | None:
        """Return the sums over these examples; None if a worker was faster."""
        job, cancelled = self._job, threading.Event()
        try:
            return await asyncio.to_thread(
                measure,
                job.model,
                parameters,
                dataset,
                examples,
                job.metrics,
                rows_of(job.batch_size),
                lambda: cancelled.is_set() or is_measured(),
            )
        finally:
            cancelled.set()  # otherwise the process would wait for the thread

    async def _description(self, dataset: Dataset) -> str:
        if self._described is None:
            self._described = await asyncio.to_thread(describe, dataset)
        return self._described

    @property
    def evaluations(self) -> tuple[dict[str, Any], ...]:
        """The step and the measures of each evaluation."""
        return tuple({"step": step} | measures for step, measures in self._found.items())


def shown(measures: Measures) -> str:
    """Return the measures that are numbers, in one line."""
    return measures_text(numbers(measures))
