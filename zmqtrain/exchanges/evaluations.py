"""A worker's share of the chief's evaluations: parts that it measures while it is held."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from zmqtrain.actors.actor import Request
from zmqtrain.data.description import describe
from zmqtrain.errors import DataError, FencedError, ProtocolError, ZmqTrainError
from zmqtrain.job import Job
from zmqtrain.metrics import Metric
from zmqtrain.models.base import Dataset, Parameters
from zmqtrain.training.evaluation import PartSums, measure, parts_of, rows_of
from zmqtrain.training.loop import TrainingLoop
from zmqtrain.training.own_loop import LoopBridge
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.control import Evaluate, Evaluated

log = logging.getLogger(__name__)

ReadVariables: TypeAlias = Callable[[bool], Awaitable[tuple[Parameters, list[int]]]]
"""Returns the current variables, or their moving averages, and the version of each shard."""

SUMS_DTYPE = "<f8"


def tensors_of(sums: PartSums) -> tuple[Tensor, ...]:
    """Return the sums of the metrics, in their order, as they travel."""
    arrays = sums.metrics.sums.values()
    return tuple(Tensor.of(np.asarray(array, SUMS_DTYPE, order="C")) for array in arrays)


def received_sums(
    metrics: Sequence[Metric], message: Evaluated, tensors: Sequence[Tensor]
) -> PartSums:
    """Return sums that have travelled.

    Raises:
        ProtocolError: they are not of these metrics.
    """
    if [tensor.dtype for tensor in tensors] != [SUMS_DTYPE] * len(metrics):
        raise ProtocolError(
            f"got {len(tensors)} tensors as the sums of {len(metrics)} metrics; expected one of "
            f"{SUMS_DTYPE} for each"
        )
    sums = PartSums(metrics)
    sums.add_measures(message.measures, message.weight)
    arrays = zip(metrics, tensors, strict=True)
    sums.metrics.sums = {metric.name: tensor.array() for metric, tensor in arrays}
    return sums


class Evaluations:
    """Measures parts of one evaluation after another, with the model of the training loop.

    No task waits for them: the chief measures a part that an error or the next step has ended.
    """

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        loop: TrainingLoop,
        read: ReadVariables,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """``dataset``: the evaluation set. ``read`` gets whether averages are wanted."""
        self._job, self._dataset, self._loop = job, dataset, loop
        self._read, self._spawn = read, spawn
        self._current = ""  # the evaluation that is under way
        self._known: tuple[str, Parameters] = "", {}  # parameters of which evaluation
        self._turn = asyncio.Lock()
        self._described: str | None = None  # the evaluation set, once it was needed

    def on_evaluate(self, request: Request, message: Evaluate) -> None:
        if not message.parts:
            self.stop()
        elif not isinstance(self._job.model, LoopBridge):  # the user's loop uses it at any time
            self._current = message.evaluation
            self._spawn(self._measure(request, message))

    def stop(self) -> None:
        """Measure no more of the evaluation that is under way."""
        self._current, self._known = "", ("", {})

    async def _measure(self, request: Request, message: Evaluate) -> None:
        try:
            async with self._turn:
                parameters = await self._parameters(message)
                for part in message.parts:
                    work = partial(self._sums, message, part, parameters)
                    if self._is_over(message) or (sums := await self._loop.use_model(work)) is None:
                        return
                    evaluated = Evaluated(message.evaluation, part, sums.weight, sums.measures)
                    request.send(evaluated, tensors_of(sums))
        except FencedError as error:  # usual under asynchronous policies: training went on
            log.debug("leaving this evaluation to the chief: %s", error)
        except ZmqTrainError as error:
            log.warning("cannot evaluate, so the chief evaluates this worker's share: %s", error)

    async def _parameters(self, message: Evaluate) -> Parameters:
        """Return the parameters to measure, read once for each evaluation.

        Raises:
            DataError: the evaluation set is not the chief's.
            FencedError: the parameters are not of this version any more.
        """
        evaluation, known = self._known
        if evaluation == message.evaluation:
            return known
        if self._described is None:
            self._described = await asyncio.to_thread(describe, self._dataset)
        if self._described != message.data:
            raise DataError(
                f"its evaluation set has {self._described}, the chief's {message.data}; give all "
                "tasks the same data"
            )
        parameters, versions = await self._read(message.average)
        if set(versions) != {message.version}:
            raise FencedError(f"the shards are at {versions}, expected {message.version}")
        if message.evaluation == self._current:
            self._known = message.evaluation, parameters
        return parameters

    def _sums(self, message: Evaluate, part: int, parameters: Parameters) -> PartSums | None:
        job, rows = self._job, rows_of(self._job.batch_size)
        parts = parts_of(len(self._dataset), rows)
        if not 0 <= part < len(parts):
            raise ProtocolError(f"there is no part {part}; expected 0 to {len(parts) - 1}")
        is_over = partial(self._is_over, message)
        return measure(
            job.model, parameters, self._dataset, parts[part], job.metrics, rows, is_over
        )

    def _is_over(self, message: Evaluate) -> bool:
        return self._current != message.evaluation or self._loop.is_computing
