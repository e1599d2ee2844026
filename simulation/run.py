"""One simulated run from beginning to end."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from simulation.cluster import SimulatedCluster
from simulation.common_points import CommonPoints
from simulation.drawing import draw
from simulation.fakes import faked, garbage_kept, log_passed
from simulation.invariants import Broken, broken_bound, check_end
from simulation.loop import VirtualLoop, unseen
from simulation.model import SameAgain, counting_job
from simulation.monitor import MessageMonitor
from simulation.network import Connection, Frames, Network
from simulation.schedule import JOB_SEED, Schedule
from zmqtrain.exchanges.worker import Worker
from zmqtrain.job import Job
from zmqtrain.wire.codec import decode

UNIX_S = 1_600_000_000.0  # the Unix time of the virtual time 0
PATIENCE_S = 150.0
"""Virtual seconds after the last fault in which a job must have ended: every timeout of a task can
pass one after another."""

STARTS_AT = 1000.0  # virtual time of a run's begin
SHARED_MEMORY = Path("/dev/shm")  # where files cost no disk

OnLine = Callable[[str], None]
"""Gets a line, with its virtual time, for all that happens."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a schedule; ``broken``: the promise that did not hold, "" if all did.

    ``matched``: number of messages that each of its rules matched. ``killed``: names of the tasks
    that were killed, in order.
    """

    schedule: Schedule
    broken: str
    messages: int
    matched: tuple[int, ...] = ()
    killed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.schedule}\n{self.broken or 'everything held'}"


def simulate(
    schedule: Schedule,
    on_line: OnLine | None = None,
    *,
    has_contents: bool = True,
    is_monitored: bool = True,
) -> Report:
    """Run a schedule in virtual time and check it. Nothing else may go on in this process.

    ``has_contents``: whether lines about messages have what these say. ``is_monitored``: whether a
    message that may not be sent ends the run.
    """
    with garbage_kept():
        return _simulate(schedule, on_line, has_contents, is_monitored)


def _simulate(
    schedule: Schedule, on_line: OnLine | None, has_contents: bool, is_monitored: bool
) -> Report:
    random = Random(f"{schedule.seed} run")
    loop = VirtualLoop(random, STARTS_AT)
    observer = _Observer(loop, on_line, has_contents, is_monitored)

    def unix_s() -> float:
        at_s, by_s = schedule.clock_set
        return UNIX_S + loop.time() + (by_s if loop.time() >= STARTS_AT + at_s else 0.0)

    network = Network(loop, random, schedule.weather, observer.watch, schedule.rules)
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="zmqtrain-simulation-", dir=parent) as name,
        faked(loop, random, unix_s, in_chunks=schedule.in_chunks, in_parts=schedule.board),
        log_passed(observer.note if on_line is not None else None),
    ):
        directory = Path(name)
        job = _job(schedule, directory)
        observer.hidden = name
        cluster = SimulatedCluster(schedule, job, loop, network, directory, observer.note)
        observer.cluster = cluster
        try:
            broken = loop.run_until_complete(_live(cluster, observer, loop))
        finally:
            loop.close()
    return Report(schedule, broken, observer.messages, tuple(network.matched), cluster.killed)


def run_seed(seed: int, policy: str = "", **kind: bool) -> Report:
    """Run the schedule of a seed; see :func:`simulation.drawing.draw`."""
    return simulate(draw(seed, policy, **kind))


def smallest(schedule: Schedule) -> Schedule:
    """Return a broken schedule without the faults that it breaks without, too."""
    for fault in schedule.faults:
        fewer = tuple(other for other in schedule.faults if other is not fault)
        if simulate(replace(schedule, faults=fewer)).broken:
            schedule = replace(schedule, faults=fewer)
    return schedule


class _Observer:
    """Has every message looked at, and ends the run when something is wrong."""

    def __init__(
        self, loop: VirtualLoop, on_line: OnLine | None, has_contents: bool, is_monitored: bool
    ) -> None:
        self.cluster: SimulatedCluster
        self.hidden = ""  # path that has another name in every run
        self.messages = 0
        self._common = CommonPoints(lambda text: self.cluster.give_up(text))
        self.monitor = MessageMonitor(lambda text: self.cluster.give_up(text), self._check_common)
        self._loop = loop
        self._on_line = on_line
        self._has_contents, self._is_monitored = has_contents, is_monitored

    def note(self, text: str) -> None:
        if self._on_line is not None:
            line = f"{self._loop.time() - STARTS_AT:9.4f} {text}"
            self._on_line(line.replace(self.hidden, "~") if self.hidden else line)

    def watch(self, connection: Connection, up: bool, frames: Frames, fate: str) -> None:
        if fate == "sent" or self._on_line is not None:
            with unseen():
                self._watch(connection, up, frames, fate)

    def _watch(self, connection: Connection, up: bool, frames: Frames, fate: str) -> None:
        if self._on_line is not None:
            arrow = "->" if up else "<-"
            text = decode(frames) if self._has_contents else "a message"
            self.note(f"{connection} {arrow} {fate}: {text}")
        if fate != "sent":
            return
        self.messages += 1
        if self._is_monitored and self.monitor.saw(connection, up, frames):
            self._check_bound()

    def _check_common(self, connection: Connection) -> None:
        """Compare the parameters of the worker that pushes with those of the others."""
        schedule = self.cluster.schedule
        if schedule.compression == "none" or schedule.tables:
            return
        for life in self.cluster.lives:
            if life.process is connection.end.process:
                for actor in life.actors:
                    if isinstance(actor, Worker):
                        self._common.check(actor, self.monitor.began_by)

    def _check_bound(self) -> None:
        leader = self.cluster.server(0).leader
        if leader is not None:
            broken = broken_bound(leader.coordinator)
            if broken:
                self.cluster.give_up(broken)


async def _live(cluster: SimulatedCluster, observer: _Observer, loop: VirtualLoop) -> str:
    """Run the cluster to its end; return what was broken."""
    limit_s = cluster.schedule.calm_at + PATIENCE_S
    try:
        cluster.start_all()
        async with asyncio.timeout(limit_s):
            await cluster.over.wait()
        if cluster.objections or loop.errors:
            return "\n".join([*cluster.objections, *loop.errors])
        check_end(cluster, observer.monitor)
    except TimeoutError:
        return "\n".join([f"the run has not ended after {limit_s:g} s", *cluster.waits()])
    except Broken as error:
        return str(error)
    finally:
        await cluster.clean_up()
    return ""


def _job(schedule: Schedule, directory: Path) -> Job:
    end = {"epochs": schedule.epochs} if schedule.epochs else {"steps": schedule.steps}
    job = counting_job(
        schedule.shards,
        schedule.bad,
        examples=schedule.examples,
        callbacks=[SameAgain()] if schedule.sets_weights else [],
        policy=schedule.policy,
        exchange="to-one" if schedule.board else "direct",
        seed=JOB_SEED,
        prefetch=schedule.prefetch,
        consistent_reads=schedule.consistent_reads,
        logdir=str(directory) if schedule.keeps else None,
        save_secs=schedule.save_secs,
        evaluate_every=schedule.evaluates,
        copies=schedule.copies,
        clip_norm=1e30 if schedule.clips else None,
        tables=schedule.tables,
        matrices=schedule.matrices,
        overlap=schedule.tables and schedule.in_chunks and not schedule.clips,
        compression=schedule.compression,
        **end,
    )
    return job.with_overrides(partition_nbytes=1 << 30) if schedule.small else job
