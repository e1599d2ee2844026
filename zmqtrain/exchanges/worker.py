"""The worker's task: a training loop whose gradients go to parameter servers.

`python -m zmqtrain.roles.worker` starts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zmqtrain.actors.actor import Request
from zmqtrain.actors.link import Link
from zmqtrain.actors.task import JobActor
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import FencedError, ZmqTrainError
from zmqtrain.exchanges.board import BoardExchange
from zmqtrain.exchanges.evaluations import Evaluations
from zmqtrain.exchanges.parameter_server import ParameterServerExchange
from zmqtrain.exchanges.reads import read_variables
from zmqtrain.models.base import Dataset, Parameters
from zmqtrain.models.rows import readers_of
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.status import Progress
from zmqtrain.training.loop import TrainingLoop
from zmqtrain.training.own_loop import LoopBridge, Place
from zmqtrain.training.step_times import StepTimes
from zmqtrain.transport.base import Transport
from zmqtrain.wire.control import Evaluate, Gather, RequestSave, Shutdown
from zmqtrain.wire.messages import Done, Heartbeat

log = logging.getLogger(__name__)


def open_exchange(actor: JobActor, links: Sequence[Link]) -> ParameterServerExchange:
    """Return a worker's side of the exchange by which the job is trained.

    ``links``: one to each task that holds a shard, in the order of the shards.
    """
    made = BoardExchange if actor.plan.exchange.is_board else ParameterServerExchange
    return made(actor, links)


class Worker(JobActor):
    """Computes gradients of one job until the job is over."""

    def __init__(
        self,
        config: TaskConfig,
        plan: Plan,
        transport: Transport,
        data: tuple[Dataset, Dataset | None] | None = None,
    ) -> None:
        """``data``: training set and evaluation set, loaded from the job's data unless given."""
        super().__init__(config, plan, transport)
        self._threads = config.threads
        to = config.profile
        self._profile = None if to is None else Path(to, config.task.hyphenated)
        self._data = data
        self.exchange: ParameterServerExchange | None = None
        self._training: TrainingLoop | None = None
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
        exchange = self.exchange = open_exchange(self, self.link_all())
        if (data := self._data or await self.load_data()) is None:
            return self.stop_code
        training, evaluation = data
        loop = self._training = TrainingLoop(
            self.job,
            training,
            exchange,
            StepTimes(self.metrics, None if self.traces is None else self._trace),
            threads=self._threads,
            profile=self._profile,
            worker=self.task.index,
        )
        if isinstance(self.job.model, LoopBridge):
            found = self.task.index, self.plan.workers, evaluation, lambda: exchange.versions[0]
            self.job.model.place = Place(*found, self._save, asyncio.get_running_loop())
        if evaluation is not None:
            read = partial(self._read_variables, exchange)
            self._evaluations = Evaluations(self.job, evaluation, loop, read, self.spawn)
        self.spawn(self._run(loop))
        try:
            await self.stopping.wait()
            return self._leave(loop, exchange)
        except asyncio.CancelledError:
            if not (self.plan.group and any(link.lost for link in self.links)):  # it may yet go on
                exchange.leave(self._failure)  # otherwise its lease would have to expire
            raise
        finally:
            if self._evaluations is not None:
                self._evaluations.stop()
            loop.close()

    def _trace(self, sequence: int, *of_step: Any) -> None:
        """Write the trace of a step whose push has this sequence."""
        if self.traces is not None:
            self.traces.note((self.task.index, self.incarnation, sequence), *of_step)

    async def _run(self, loop: TrainingLoop) -> None:
        try:
            await loop.run()
        except ZmqTrainError as error:
            self._failure = str(error)
            raise

    def _leave(self, loop: TrainingLoop, exchange: ParameterServerExchange) -> int:
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
        self, exchange: ParameterServerExchange, average: bool
    ) -> tuple[Parameters, list[int]]:
        if not exchange.lanes:  # it is about to join
            raise FencedError(f"{self.task} has not joined yet")
        segments = [lane.reached for lane in exchange.lanes]
        reading = read_variables(self.plan, self.links, segments, average=average)
        values, versions = await reading
        rows = exchange.rows and exchange.rows.exact()
        return values | readers_of(self.job.table_variables(), rows), versions

    async def _save(self) -> str | None:
        """Have the chief save a checkpoint, for the user's own loop; None: there is none."""
        try:
            reply = await self.links[0].request(RequestSave(), reason="its loop saves a checkpoint")
        except FencedError as error:  # it joins at its next step
            log.warning("no checkpoint was saved: %s", error)
            return None
        return reply.expect(Done).text

    def heartbeat(self) -> Heartbeat:
        is_finished = self.exchange is not None and self.exchange.is_finished
        metrics = self.metrics
        nbytes = metrics.bytes_sent.total + metrics.bytes_received.total
        counts = metrics.steps.total, nbytes, metrics.local_step.value
        return replace(
            super().heartbeat(),
            finished=is_finished,
            phases_s=metrics.phase_duration_seconds.totals(),
            progress=Progress(*map(int, counts)),
        )
