"""The chief: `python -m zmqtrain.roles.chief`.

It begins the job (restores or initialises), watches it, evaluates, saves, and ends it. No step
needs the chief: training goes on while it is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zmqtrain.actors.joining import join_all
from zmqtrain.actors.link import Link
from zmqtrain.actors.task import JobActor
from zmqtrain.callbacks.history import History
from zmqtrain.chief.conclusion import conclude
from zmqtrain.chief.epochs import Epochs, Progress
from zmqtrain.chief.evaluation_parts import Helpers
from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.chief.on_the_way import OnTheWay
from zmqtrain.chief.saving import Saver
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import (
    RETRYABLE,
    CheckpointError,
    ConfigError,
    DataError,
    ExitCode,
    FencedError,
    NotAdmittedError,
    PeerLostError,
    ZmqTrainError,
)
from zmqtrain.exchanges.lanes import map_segment, read_variables
from zmqtrain.models.base import Dataset
from zmqtrain.observe.summary import Summary
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.checkpoint import Saved
from zmqtrain.protocol.status import Status, TaskStatus
from zmqtrain.store.segment import Reached
from zmqtrain.transport.base import Transport
from zmqtrain.wire.messages import (
    Close,
    Evaluated,
    Extend,
    Gather,
    GetStatus,
    Heartbeat,
    Initialize,
    Keep,
    Leave,
    Parameters,
    Read,
    Save,
    SaveEnded,
    SetRate,
    Shutdown,
)

SAVE_AGAIN_S = 0.5  # after the last checkpoint failed
WATCH_S = 0.25  # how often progress is shown, and evaluations and saves become due

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
        job = plan.job
        self.summary: Summary | None = None
        self.ending = False  # the shutdown is being broadcast
        self.learned_until = 0
        self._goes_on_term = config.on_term == "leave"
        self._leaves_on_term = self._goes_on_term and not plan.is_on_workers  # else it ends the job
        self._on_progress = on_progress
        self._data = data
        self._layouts = plan.layouts
        self._links: list[Link] = []
        self._tasks: tuple[TaskStatus, ...] = ()  # of the last status
        self._segments: list[Reached | None] = []  # of the ps on this host
        self._saver = Saver(job, self._layouts, self.fingerprint, self.metrics, self._write_shards)
        self._evaluator: Evaluator
        self._on_the_way: OnTheWay
        self._epochs: Epochs | None = None  # if the job has epochs
        self._epochs_failure: ZmqTrainError | None = None  # of a callback or an evaluation
        self._is_ending = False
        self._stopped_by = "a signal"
        self._chosen: dict[str, Any] = {}  # weights that a callback has set at the end
        self._helpers = Helpers(job, lambda message: self.leader.send(message), self._idle_workers)
        self._ps_left = asyncio.Event()  # with the last checkpoint, until it is back
        self.handlers = {
            Gather: self.on_gather,
            Evaluated: self._helpers.on_evaluated,
            Leave: lambda *_: self._ps_left.set(),
        }

    @property
    def history(self) -> History:
        """What was measured after each epoch."""
        return History() if self._epochs is None else self._epochs.history

    @property
    def leader(self) -> Link:
        return self._links[0]

    async def main(self) -> int:
        self._links = self.link_all()
        try:
            return await self._run_job()
        except ZmqTrainError as error:
            # Another chief may have a key that all ps know: a running job waits for it.
            may_be_replaced = isinstance(error, NotAdmittedError) and self._may_have_begun
            if error.exit_code < RETRYABLE and self.incarnation and not may_be_replaced:
                # A restarted chief would fail in the same way: end the others now.
                await self._broadcast_shutdown(error.exit_code, f"the chief failed: {error}")
            raise

    async def _run_job(self) -> int:
        training, evaluation = self._data or await self.load_data()
        self._evaluator = Evaluator(
            self.job, evaluation, self.metrics, self.read_parameters, self._helpers
        )
        every, steps = self.job.evaluate_every, self.job.steps
        self._on_the_way = OnTheWay(self._evaluator, self, every=every, steps=steps)
        if self.job.epochs:
            self._epochs = Epochs(self.job, len(training), self._evaluator, self)
        await self._saver.check()
        self.metrics.role_state.set("joining")
        begin = asyncio.ensure_future(self._begin_first())
        if not await self._unless_stopped(begin, self.timing.grace_s / 2):
            if self._is_leaving:
                return self._leave()
            # Tasks that know this chief may wait for it. A later chief saves what was learned.
            if self.incarnation and not self._may_have_begun:
                reason = f"stopped by {self._stopped_by} before the job began: nothing to save"
                await self._broadcast_shutdown(self.stop_code, reason)
            return self.stop_code
        for link in self._links:
            self.spawn(link.silence())
        await self._evaluator.check()  # by now the others can be told of a mistake
        is_in = True
        while True:  # once for each generation
            try:
                if not is_in and not await self._unless_stopped(
                    asyncio.ensure_future(self._begin(again=True)), self.timing.grace_s / 2
                ):
                    return self._leave() if self._is_leaving else self.stop_code
                self.metrics.role_state.set("training")
                watching = asyncio.ensure_future(self._watch())
                # A ps that has gone before would let it wait for its next life.
                patience_s = self.timing.grace_s if self._leaves_on_term else None
                if not await self._unless_stopped(watching, patience_s):
                    return self._leave()
                status = watching.result()
                if self._is_leaving and not (status.stop or status.failure):
                    with contextlib.suppress(ZmqTrainError, TimeoutError):
                        saving = asyncio.ensure_future(self._save_for_leavers(status))
                        await self._unless_stopped(saving, self.timing.grace_s)
                    return self._leave()
                self.metrics.role_state.set("draining")
                ending = asyncio.ensure_future(self._end(status))
                if not await self._unless_stopped(ending, None):
                    return self._leave()
                return ending.result()
            except FencedError as error:
                log.warning("%s; joining again", error)
                is_in = self._is_ending = False
                self._chosen = {}

    @property
    def _is_leaving(self) -> bool:
        """Whether this chief, and not the job, was told to end."""
        return self._leaves_on_term and self.stop_code == ExitCode.TERMINATED

    async def _save_for_leavers(self, status: Status) -> None:
        """Save for every ps that leaves, too: who takes a machine away tells all of its tasks.

        Raises:
            ZmqTrainError: it failed.
            TimeoutError: ps 0 does not answer.
        """
        patience_s = self.timing.lease_s
        until = time.monotonic() + patience_s
        while self.job.logdir and time.monotonic() < until:
            if status.save_wanted:
                await self._save(status.step)
                until = time.monotonic() + patience_s
            async with asyncio.timeout(patience_s):
                status = await self.status(status.event, min(WATCH_S, patience_s / 2))

    def _leave(self) -> int:
        """Let the next chief take over; training goes on meanwhile."""
        log.info("leaving; the job goes on, and waits for another chief")
        for link in self._links:
            if link.joined:
                link.send(Leave("an engine told it to leave"))
        return self.stop_code

    async def _unless_stopped(self, waiting: asyncio.Future[Any], patience_s: float | None) -> bool:
        """Wait for ``waiting``; return False if a signal comes first, and cancel it.

        If the job may have begun, there is something to save: ``waiting`` gets so much more time,
        unless an engine takes this chief away and a ps has left: nothing can be saved without it.
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
                waiting.result()  # raises what ended it
            return waiting.done()
        finally:
            for future in (waiting, stopped, left):
                future.cancel()
            await asyncio.wait([waiting])  # it cleans up

    @property
    def _may_have_begun(self) -> bool:
        """Whether some ps has begun a generation, or was asked to begin one."""
        return self.generation > 0 or self.known_generation > 0

    async def _begin_first(self) -> None:
        """Begin; once more if a ps is restarted meanwhile."""
        watching = asyncio.ensure_future(self._watch_for_stop())
        try:
            while True:
                try:
                    return await self._begin()
                except FencedError as error:
                    log.warning("%s; joining again", error)
        finally:
            watching.cancel()

    async def _watch_for_stop(self) -> None:
        """Stop if that is asked for before the job begins, as while a ps has not come."""
        while not self._may_have_begun:
            await asyncio.sleep(WATCH_S)
            if self.leader.joined:
                with contextlib.suppress(ZmqTrainError):  # whoever begins learns of it, too
                    status = await self.status()
                    if status.stop_wanted and not self._may_have_begun:
                        self._stop_as_asked()

    def _stop_as_asked(self) -> None:
        """End the job; an engine starts again what does not end well."""
        self._stopped_by = "zmqtrain stop"
        self.stop(ExitCode.OK if self._leaves_on_term else ExitCode.INTERRUPTED)

    async def _begin(self, *, again: bool = False) -> None:
        """Take over a running job, else restore its newest checkpoint, else initialise it.

        ``again``: some ps has lost its parameters. Before the first checkpoint of a logdir the job
        begins once more; without a logdir it ends, as nothing would ever be saved.
        """
        joined = await join_all(self, self._links)
        self._ps_left.clear()
        self._segments = []
        for shard, one in enumerate(joined):
            reached = await map_segment(self, shard, one)
            self._segments.append(reached and reached[0])
        generations = [one.generation for one in joined]
        lost = [
            one.link.peer
            for one in joined
            if one.generation < max(generations) or not one.generation
        ]
        if not lost and not await self._saver.has_later(generations[0]):
            self.generation = self.learned_until = generations[0]
            log.info("taking over in generation %d", self.generation)
            await self._on_the_way.ask_again()
            return
        path, self.learned_until, generation = await self._saver.newest()
        begun = [one.link for one in joined if one.generation]
        if lost and (again or any(await self._versions(begun))):  # else no update is lost
            text = f"{' and '.join(lost)} restarted without parameters"
            if self.job.logdir is None:
                raise CheckpointError(
                    f"{text}, and there is no checkpoint to restore; give the job a logdir "
                    "(--logdir DIR)"
                )
            log.warning("%s: restoring %s", text, path or "the beginning: nothing was saved yet")
        await self._initialize(path, max(*generations, generation, self.generation) + 1)

    async def _initialize(self, path: Path | None, generation: int) -> None:
        """Begin a generation from a checkpoint; None: from the seed."""
        self.generation = generation
        self._on_the_way.forget()
        await self._saver.note_generation(generation)
        async with self._saver.shared_directory() as logdir:
            message = Initialize(str(path) if path is not None else None, logdir)
            await asyncio.gather(
                *(link.request(message, reason="it is initialising") for link in self._links)
            )

    async def _versions(self, links: Sequence[Link]) -> list[int]:
        """Return how many updates each of these ps has applied."""
        replies = [
            await link.request(Read(values=False), reason="it is asked for its version")
            for link in links
        ]
        return [reply.expect(Parameters).version for reply in replies]

    async def _watch(self) -> Status:
        """Show progress, evaluate and save when due, until there is a reason to end.

        Raises:
            FencedError: some ps was restarted; every request to a ps may raise this.
        """
        seen, begins = 0, True
        while True:
            at_once = begins and not self._evaluator.is_done  # before the first step to evaluate
            status = await self.status(seen, 0.0 if at_once else WATCH_S)
            seen, self._tasks = status.event, status.tasks
            for link in self._links:
                link.check()
            if not status.initialised:
                raise FencedError(f"{self.leader.peer} was restarted")
            self._on_progress(status)
            if status.stop_wanted:
                self._stop_as_asked()
            if status.failure or status.stop_code or self.stopping.is_set():
                return status
            if self._epochs is not None and not await self._follow_epochs(
                self._epochs, status, begins
            ):
                return status
            begins = False
            if status.stop:
                return status
            wants_save = status.save_wanted or self._saver.is_due(status.step)
            if wants_save and not self._ps_left.is_set():
                with contextlib.suppress(CheckpointError):  # logged and counted; the job goes on
                    await self._save(status.step)
            await self._on_the_way.follow(status.step)

    async def _follow_epochs(self, epochs: Epochs, status: Status, begins: bool) -> bool:
        """Call the callbacks; return False if the training is over.

        ``begins``: this chief sees the generation for the first time.
        """
        at = _progress(status)
        is_held = status.limit is not None and status.uncounted >= status.limit
        try:
            if not begins and not await epochs.step(at):
                return False
            if is_held:
                await self._wait_for_shards(self.timing.heartbeat_s)  # callbacks see the epoch
                await self._on_the_way.follow(status.step)  # a step before its end, if it is kept
            elif not begins:
                return True
            limit = await (epochs.begin(at) if begins else epochs.next_limit(at))
        except (ConfigError, DataError, CheckpointError) as error:
            log.error("%s", error)
            self._epochs_failure = error
            return False
        if limit is None:
            return False
        await self.leader.request(Extend(limit), reason="the next epoch begins")
        return True

    async def _save(self, step: int) -> None:
        """Save a checkpoint, and report it to the clients that asked for one.

        Raises:
            CheckpointError: it failed.
        """
        try:
            path = await self._saver.save(step, self.generation)
        except CheckpointError as error:
            self.leader.send(SaveEnded("", str(error)))
            raise
        if path is not None:
            self.leader.send(SaveEnded(str(path), ""))

    async def _save_last(self, step: int) -> None:
        """Save the last checkpoint; try again for a while, as the job ends without it.

        Raises:
            CheckpointError: it failed each time.
        """
        until = time.monotonic() + self.timing.grace_s / 8
        while True:
            try:
                return await self._save(step)
            except CheckpointError:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(SAVE_AGAIN_S)

    async def _write_shards(self, directory: Path) -> Saved:
        reply = await self.leader.request(
            Save(str(directory)), reason="the shards are writing a checkpoint"
        )
        return reply.expect(Saved)

    def _idle_workers(self) -> list[int]:
        """Return the workers that may measure the parameters, while these stand still."""
        if self._chosen:
            return []
        return [
            task.index
            for task in self._tasks
            if task.role == Role.WORKER and task.state not in ("left", "silent", "joining")
        ]

    async def status(self, seen: int = 0, wait_s: float = 0.0) -> Status:
        """Return the job's status as the leader has it."""
        reply = await self.leader.request(
            GetStatus(seen, wait_s), reason="it has not reported the status"
        )
        return reply.expect(Status)

    async def keep(self, version: int) -> list[int]:
        """Have every ps keep this version for an evaluation; return those that they are at."""
        keep = Keep(version, self.job.evaluate_average)
        requests = (link.request(keep, reason="it keeps a version") for link in self._links)
        return [reply.expect(Parameters).version for reply in await asyncio.gather(*requests)]

    async def read_parameters(self, average: bool = False, at: int = 0) -> dict[str, Any]:
        """Return the current variables or their moving averages; at the end, chosen ones.

        ``at``: those of this version, which every ps has kept.
        """
        if self._chosen:
            return self._chosen
        values, _ = await read_variables(
            self.plan, self._links, self._segments, average=average, at=at
        )
        return values

    async def write_parameters(self, weights: Mapping[str, Any]) -> None:
        """Begin a new generation with these variables, from a checkpoint that holds them.

        At the end they are what the training ends with; the checkpoint keeps the last ones.

        Raises:
            ConfigError: there is no directory that all ps share.
            CheckpointError: the checkpoint cannot be written.
        """
        if self._is_ending:
            self._chosen = dict(weights)
            return
        if self.job.logdir is None and None in self._segments:
            raise ConfigError(
                "a callback sets weights between epochs, and some ps has no memory that the chief "
                "maps (it is on another host, or the lane is tcp); expected a directory in which "
                "all ps find them: give the job a logdir"
            )
        weights = {**weights, **self.job.frozen()}  # every task has these already
        async with self._saver.with_weights(weights, self.generation + 1) as path:
            await self._initialize(path, self.generation + 1)

    async def set_learning_rate(self, rate: float | None) -> None:
        """Use this learning rate on every shard; None: the optimizer's own."""
        await self.leader.request(SetRate(rate), reason="it sets the learning rate")

    async def _end(self, status: Status) -> int:
        """Call back, save and evaluate, then broadcast the shutdown.

        Raises:
            FencedError: some ps was restarted; all of this must be done once more.
        """
        if not status.stop and not status.failure:
            await self._close(*self._verdict(status))
        if not status.failure:
            await self._wait_for_shards()
        if status.stop and not status.stop_code:
            await self._on_the_way.follow(status.step)  # of one that they came to since
        if self._epochs is not None:
            await self._end_epochs(self._epochs)
        is_over = self._epochs is not None and self._epochs.ended
        is_complete = bool((status.stop and not status.stop_code) or status.failure or is_over)
        if not is_over:
            self._chosen = {}  # an interrupted job goes on where it was
        code, ended, measures = await conclude(
            *self._verdict(status),
            partial(self._save_last, status.step),
            partial(self._evaluator.evaluate, status.step) if is_complete else None,
        )
        final = await self.status()
        self._on_progress(final)
        last, average = await self.read_parameters(), self.job.evaluate_average
        self.summary = Summary.of(
            final,
            job=self.job_name,
            ps=0 if self.plan.is_on_workers else self.plan.shards,
            workers=self.plan.workers,
            last=last,
            parameters=await self.read_parameters(True) if average else last,
            history=self.history,
            checkpoint=self._saver.last,
            evaluations=self._evaluator.evaluations,
            exit_code=code,
            ended=ended,
            measures=measures,
        )
        await self._broadcast_shutdown(code, ended)
        return code

    async def _close(self, exit_code: int, reason: str) -> None:
        """Let the workers finish their steps, so that the checkpoint holds all that was learned.

        After a time limit the job goes on without slow workers: their last gradients are lost.
        """
        for at_once, share in ((False, 3 / 8), (True, 1 / 8)):
            limit_s = share * self.timing.grace_s
            try:
                await self.leader.request(
                    Close(at_once, int(exit_code), reason),
                    reason="workers finish their steps",
                    timeout_s=limit_s,
                )
                return
            except PeerLostError:
                log.warning("the workers did not finish their steps within %.2g s", limit_s)

    async def _end_epochs(self, epochs: Epochs) -> None:
        self._is_ending = True
        try:
            await epochs.end(_progress(await self.status()))
        except (ConfigError, DataError, CheckpointError) as error:
            self._epochs_failure = self._epochs_failure or error

    def _verdict(self, status: Status) -> tuple[int, str]:
        if status.failure:
            return status.failure_code, status.failure
        if status.stop_code:  # a chief before this one was ending the job
            return status.stop_code, status.stop
        if self._epochs_failure is not None:
            return self._epochs_failure.exit_code, str(self._epochs_failure)
        if self._epochs is not None and self._epochs.ended:
            return ExitCode.OK, self._epochs.ended
        if status.stop:
            return ExitCode.OK, status.stop
        return self.stop_code, f"stopped by {self._stopped_by}"

    async def _wait_for_shards(self, patience_s: float = 0.0) -> None:
        """Wait until every shard has applied the last update, if it can.

        ``patience_s``: for parts of pushes that the leader does not know of, which may be under way
        between two epochs if the policy is not coordinated.

        The update may be queued, and a restarted ps may still have to join the leader. If a worker
        died during its push, some shards may never receive it.
        """
        status, until = await self.status(), time.monotonic() + patience_s
        while True:
            was_delivered = status.all_delivered
            versions = await self._versions(self._links)
            status = await self.status()  # a step may have been made since
            if min(versions) >= status.step:
                return
            if was_delivered and status.all_delivered and time.monotonic() >= until:
                text = "the shards end at versions %s, not all at step %d"
                log.warning(text, versions, status.step)
                return
            await asyncio.sleep(0.01)

    async def _broadcast_shutdown(self, code: int, reason: str) -> None:
        self.ending = True
        summary = "" if self.summary is None else self.summary.told()
        message = Shutdown(int(code), reason, summary)
        results = await asyncio.gather(
            *(
                link.request(message, reason="it has not confirmed the end", timeout_s=2.0)
                for link in self._links
            ),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, ZmqTrainError):
                log.warning("%s", result)

    def tasks_with_metrics(self) -> Iterable[tuple[str, int, str]]:
        return [(t.role, t.index, t.metrics) for t in self._tasks if t.state != "left"]

    def heartbeat(self) -> Heartbeat:
        return replace(super().heartbeat(), saved_step=self._saver.last_step)


def _progress(status: Status) -> Progress:
    return Progress(
        status.step,
        status.uncounted,
        status.pass_loss,
        status.learning_rate,
        status,
        examples=status.pass_examples,
        sums=status.pass_sums,
    )
