"""The chief: `python -m zmqtrain.roles.chief`.

It begins the job (restores or initialises), watches it, evaluates, saves, and ends it. No step
needs the chief: training goes on while it is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from zmqtrain.actors.joining import join_all
from zmqtrain.actors.task import JobActor
from zmqtrain.chief.background import BackgroundEvaluations
from zmqtrain.chief.conductor import WATCH_S, Conductor
from zmqtrain.chief.evaluation_parts import EvaluationWorkers
from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.chief.linked_job import LinkedJob
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import (
    RETRYABLE,
    CheckpointError,
    ExitCode,
    FencedError,
    NotAdmittedError,
    ZmqTrainError,
)
from zmqtrain.models.base import Dataset
from zmqtrain.observe.outcome import STOPPED_BY
from zmqtrain.observe.summary import Summary
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.status import Status
from zmqtrain.transport.base import Transport
from zmqtrain.units import counted
from zmqtrain.wire.control import Evaluated, Gather
from zmqtrain.wire.messages import Heartbeat, Leave

AWAY_S = 2.5  # without an answer: ps 0 is away

log = logging.getLogger(__name__)


class Chief(JobActor):
    """Begins, watches and ends one job."""

    def __init__(
        self,
        config: TaskConfig,
        plan: Plan,
        transport: Transport,
        on_progress: Callable[[Status], None],
        data: tuple[Dataset, Dataset | None] | None = None,
    ) -> None:
        """``data``: training set and evaluation set, loaded from the job's data unless given."""
        super().__init__(config, plan, transport)
        self.summary: Summary | None = None
        self.ending = False  # the shutdown is being broadcast
        self._goes_on_term = config.on_term == "leave"
        self._leaves_on_term = self._goes_on_term and not plan.is_on_workers  # else it ends the job
        self._on_progress = on_progress
        self._data = data
        self._cluster = LinkedJob(self)
        self._evaluation_workers = EvaluationWorkers(
            self.job, lambda message: self._cluster.leader.send(message), self._cluster.idle_workers
        )
        self._evaluations: BackgroundEvaluations
        self._conductor: Conductor
        self._ps_left = asyncio.Event()  # with the last checkpoint, until it is back
        self.handlers = {
            Gather: self.on_gather,
            Evaluated: self._evaluation_workers.on_evaluated,
            Leave: lambda *_: self._ps_left.set(),
        }

    async def main(self) -> int:
        self._cluster.links = self.link_all()
        try:
            return await self._run_job()
        except ZmqTrainError as error:
            # Another chief may have a key that all ps know: a running job waits for it.
            may_be_replaced = isinstance(error, NotAdmittedError) and self._may_have_begun
            if error.exit_code < RETRYABLE and self.incarnation and not may_be_replaced:
                # A restarted chief would fail in the same way: end the others now.
                await self._shut_down(error.exit_code, f"the chief failed: {error}")
            raise

    async def _run_job(self) -> int:
        job, cluster = self.job, self._cluster
        data = self._data
        if data is None or job.logdir:  # checkpoints say of which data they are
            data = await self.load_data(data)
        if data is None:
            return self.stop_code
        training, evaluation = data
        evaluator = Evaluator(
            job,
            evaluation,
            self.metrics,
            cluster.read_parameters,
            cluster.tables,
            self._evaluation_workers,
        )
        self._evaluations = BackgroundEvaluations(
            evaluator, cluster, every=job.evaluate_every, steps=job.steps
        )
        self._conductor = Conductor(
            job,
            cluster,
            evaluator,
            self._evaluations.follow,
            self._on_progress,
            training=training,
            name=self.job_name,
        )
        checking = asyncio.ensure_future(cluster.saver.check())
        if not await self._unless_stopped(checking, None):
            return self.stop_code
        self.run_record = self._conductor.record.as_dict
        if self.metrics_address:
            log.info("watch this run at %s://%s/", self._metrics_scheme, self.metrics_address)
        workers = counted(self.plan.workers, "worker")
        tasks = workers if self.plan.is_on_workers else f"{self.plan.shards} ps and {workers}"
        log.info("waiting for %s to load the job", tasks)
        self.metrics.role_state.set("joining")
        self.spawn(self._watch_for_stop())
        again = False
        while True:  # once for each generation
            try:
                begin = asyncio.ensure_future(self._begin(again=again))
                if not await self._unless_stopped(begin, self.timing.grace_s / 2):
                    return await self._stop_early()
                if not again:
                    for link in cluster.links:
                        self.spawn(link.silence())
                    await evaluator.check()  # by now the others can receive the error
                again = True
                return await self._run_generation()
            except FencedError as error:
                names = " and ".join(link.peer for link in cluster.links if link.fenced) or "a ps"
                log.info("%s has restarted; the chief is joining again", names)
                log.debug("%s", error)

    async def _stop_early(self) -> int:
        """Leave the job, or end it if it has not begun: tasks that know this chief may wait for it.

        A job that has begun waits for a later chief, which saves its parameters.
        """
        if self._is_leaving:
            return await self._leave()
        if self.incarnation and not self._may_have_begun:
            reason = f"{self._cluster.stopped[1]} before the job began: nothing to save"
            await self._shut_down(self.stop_code, reason)
        return self.stop_code

    async def _run_generation(self) -> int:
        """Watch the job, and end it or leave it; return the exit code.

        Raises:
            FencedError: some ps was restarted; every request to a ps may raise this.
        """
        self.metrics.role_state.set("training")
        watching = asyncio.ensure_future(self._watch())
        # A ps that has gone before would let it wait for its next life.
        patience_s = self.timing.grace_s if self._leaves_on_term else None
        if not await self._unless_stopped(watching, patience_s):
            return await self._leave()
        status = watching.result()
        if self._is_leaving and not (status.stop or status.failure):
            saving = asyncio.ensure_future(self._save_for_leavers(status))
            try:
                await self._unless_stopped(saving, self.timing.grace_s)
            except (ZmqTrainError, TimeoutError) as error:
                why = str(error) or "ps 0 did not answer in time"
                log.warning("the ps that leave have no checkpoint of this chief: %s", why)
            return await self._leave()
        self.metrics.role_state.set("draining")
        ending = asyncio.ensure_future(self._end(status))
        if not await self._unless_stopped(ending, None):
            return await self._leave()
        return ending.result()

    @property
    def _is_leaving(self) -> bool:
        """Whether this chief is to end, and not the job."""
        return self._leaves_on_term and self.stop_code == ExitCode.TERMINATED

    async def _save_for_leavers(self, status: Status) -> None:
        """Save for the ps that leave, too: an engine that takes a machine terminates all its tasks.

        Raises:
            ZmqTrainError: it failed.
            TimeoutError: ps 0 does not answer.
        """
        patience_s = self.timing.lease_s
        until = time.monotonic() + patience_s
        while self.job.logdir and time.monotonic() < until:
            if status.save_wanted:
                await self._conductor.save(status.step)
                until = time.monotonic() + patience_s
            async with asyncio.timeout(patience_s):
                status = await self._cluster.status(status.event, min(WATCH_S, patience_s / 2))
        try:
            await self._cluster.saver.finish(lambda: True)
        except CheckpointError as error:
            log.error("%s", error)

    async def _leave(self) -> int:
        """Let the next chief take over; training goes on meanwhile."""
        log.info("leaving; the job goes on, and waits for another chief")
        self._cluster.leave()
        await self._conductor.record.leave()
        return self.stop_code

    async def _unless_stopped(self, waiting: asyncio.Future[Any], patience_s: float | None) -> bool:
        """Wait for ``waiting``; return False if a signal comes first, and cancel it.

        If the job may have begun, there is something to save: ``waiting`` gets ``patience_s`` more,
        or, if an engine takes this chief away, until a ps leaves, as nothing can be saved then.
        """
        stopped = asyncio.ensure_future(self.stopping.wait())
        left = asyncio.ensure_future(self._ps_left.wait())
        either: list[asyncio.Future[Any]] = [waiting, stopped]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._may_have_begun:
                goes = self._goes_on_term and self.stop_code == ExitCode.TERMINATED
                ends = [waiting, left] if goes else [waiting]
                await asyncio.wait(ends, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()  # raises its error
            return waiting.done()
        finally:
            for future in (waiting, stopped, left):
                future.cancel()
            await asyncio.wait([waiting])  # it cleans up

    @property
    def _may_have_begun(self) -> bool:
        """Whether some ps has begun a generation, or was asked to begin one."""
        return self.generation > 0 or self.known_generation > 0

    async def _watch_for_stop(self) -> None:
        """Stop if that is asked for before the job begins, as while a ps has not come."""
        while not self._may_have_begun:
            await asyncio.sleep(WATCH_S)
            if self._cluster.leader.joined:
                with contextlib.suppress(ZmqTrainError):  # the begin of the job raises it, too
                    status = await self._cluster.status()
                    if status.stop_wanted and not self._may_have_begun:
                        self._stop_as_asked()

    def _stop_as_asked(self) -> None:
        """End the job, with success under an engine, which would restart the tasks otherwise."""
        self._cluster.stop_reason = f"{STOPPED_BY}zmqtrain stop"
        self.stop(ExitCode.OK if self._leaves_on_term else ExitCode.INTERRUPTED)

    def fail(self, error: ZmqTrainError) -> None:
        """End the job by this error, and save its parameters, if it is not ending already."""
        if not self.stopping.is_set():
            self._cluster.stop_reason = str(error)
            self.stop(error.exit_code)

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint of this run, None if there is none."""
        return None if self._cluster.saver.last is None else self._cluster.saver.last_step

    async def _begin(self, *, again: bool) -> None:
        """Join every ps, and begin or take over the job; ``again``: some ps was restarted."""
        joined = await join_all(self, self._cluster.links)
        self._ps_left.clear()
        await self._cluster.begin(joined, again=again)
        await self._evaluations.ask_again()

    async def _watch(self) -> Status:
        """Show progress, call back, evaluate and save when due. FencedError: a ps was restarted."""
        conductor, seen, begins = self._conductor, 0, True
        while True:
            at_once = begins and not self._evaluations.is_done  # before the first step to evaluate
            status = await self._status(seen, 0.0 if at_once else WATCH_S)
            seen = status.event
            self._cluster.check(status)
            await conductor.show(status)
            if status.stop_wanted:
                self._stop_as_asked()
            if status.failure or status.stop_code or self.stopping.is_set():
                return status
            if not await conductor.follow(status, begins=begins) or status.stop:
                return status
            begins = False
            if not self._ps_left.is_set():
                await conductor.save_if_due(status.step, is_wanted=status.save_wanted)
            await self._evaluations.follow(status.step)

    async def _status(self, seen: int, wait_s: float) -> Status:
        """Return the next status; note in the record if ps 0 does not send it."""
        miss = asyncio.get_running_loop().call_later(AWAY_S, self._conductor.record.miss)
        try:
            return await self._cluster.status(seen, wait_s)
        finally:
            miss.cancel()

    async def _end(self, status: Status) -> int:
        """End the job and all tasks; return its exit code. FencedError: to be done once more."""
        self.summary = await self._conductor.end(
            status,
            patience_s=self.timing.grace_s / 8,
            job=self.job_name,
            ps=0 if self.plan.is_on_workers else self.plan.shards,
            workers=self.plan.workers,
        )
        await self._shut_down(self.summary.exit_code, self.summary.ended)
        return self.summary.exit_code

    async def _shut_down(self, code: int, reason: str) -> None:
        self.ending = True
        summary = "" if self.summary is None else self.summary.told()
        await self._cluster.shut_down(code, reason, summary)

    def tasks_with_metrics(self) -> Iterable[tuple[str, int, str]]:
        return [(t.role, t.index, t.metrics) for t in self._cluster.tasks if t.state != "left"]

    def heartbeat(self) -> Heartbeat:
        return replace(super().heartbeat(), saved_step=self._cluster.saver.last_step)
