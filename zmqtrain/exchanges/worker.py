"""The worker's task: a training loop whose gradients go to parameter servers.

`python -m zmqtrain.roles.worker` starts it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import FencedError, ZmqTrainError
from zmqtrain.exchanges.board import BoardExchange
from zmqtrain.exchanges.evaluations import Evaluations
from zmqtrain.exchanges.lanes import read_variables
from zmqtrain.exchanges.parameter_server import ParameterServerExchange
from zmqtrain.job import Job
from zmqtrain.models.base import Dataset, Parameters
from zmqtrain.training.loop import TrainingLoop
from zmqtrain.transport.base import Transport
from zmqtrain.wire.messages import Evaluate, Gather, Heartbeat, Shutdown

log = logging.getLogger(__name__)

Exchange: TypeAlias = ParameterServerExchange | BoardExchange


class Worker(JobActor):
    """Computes gradients of one job until the job is over."""

    def __init__(
        self,
        config: TaskConfig,
        job: Job,
        transport: Transport,
        data: tuple[Dataset, Dataset | None] | None = None,
    ) -> None:
        """``data``: training set and evaluation set, loaded from the job's data unless given."""
        super().__init__(config, job, transport)
        self._threads = config.threads
        self._data = data
        self._exchange: Exchange | None = None
        self._training: TrainingLoop | None = None
        self.end: Shutdown | None = None
        self._failure = "it ended with an error"
        self._evaluations: Evaluations | None = None
        self.handlers = {
            Shutdown: self._on_shutdown,
            Gather: self.on_gather,
            Evaluate: self._on_evaluate,
        }

    def ready(self, *, everyone: bool = False) -> tuple[bool, str]:
        is_in = self._training is not None and self._training.has_joined
        return is_in, "training" if is_in else "joining"

    async def main(self) -> int:
        kind = BoardExchange if self.board else ParameterServerExchange
        exchange = self._exchange = kind(self, self.link_all())
        training, evaluation = self._data or await self.load_data()
        loop = self._training = TrainingLoop(
            self.job, training, exchange, self.metrics, threads=self._threads
        )
        if evaluation is not None:
            read = partial(self._read_variables, exchange)
            self._evaluations = Evaluations(self.job, evaluation, loop, read, self.spawn)
        self.spawn(self._run(loop))
        try:
            await self.stopping.wait()
            return self._leave(loop, exchange)
        except asyncio.CancelledError:
            if not (self.group and any(link.lost for link in self.links)):  # it may yet go on
                exchange.leave(self._failure)  # otherwise its lease would have to expire
            raise
        finally:
            if self._evaluations is not None:
                self._evaluations.stop()
            loop.close()

    async def _run(self, loop: TrainingLoop) -> None:
        try:
            await loop.run()
        except ZmqTrainError as error:
            self._failure = str(error)
            raise

    def _leave(self, loop: TrainingLoop, exchange: Exchange) -> int:
        reason = self.end.reason if self.end is not None else "stopped by a signal"
        exchange.leave(reason)
        log.info("leaving after %d steps: %s", loop.steps, reason)
        return self.stop_code

    def _on_shutdown(self, request: Request, message: Shutdown) -> None:
        if self.end is None:
            self.end = message
            self.stop(message.exit_code)

    def _on_evaluate(self, request: Request, message: Evaluate) -> None:
        if self._evaluations is not None:
            self._evaluations.on_evaluate(request, message)

    async def _read_variables(
        self, exchange: Exchange, average: bool
    ) -> tuple[Parameters, list[int]]:
        """
        Raises:
            FencedError: this worker is about to join.
        """
        if not exchange.lanes:
            raise FencedError(f"{self.task} has not joined yet")
        segments = [lane.reached for lane in exchange.lanes]
        return await read_variables(self.job, self.links, segments, average=average)

    def heartbeat(self) -> Heartbeat:
        is_finished = self._exchange is not None and self._exchange.is_finished
        phases_s = self.metrics.phase_duration_seconds.totals()
        return replace(super().heartbeat(), finished=is_finished, phases_s=phases_s)
