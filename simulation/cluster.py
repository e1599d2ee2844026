"""The tasks of one simulated run, and their supervisor, which starts, kills and restarts them.

A task that ends with a retryable exit code is restarted until the chief has ended the run, as
`zmqtrain.errors` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from simulation.fakes import memory_of, put_back, unlock
from simulation.faults import Fault
from simulation.loop import Process, VirtualLoop
from simulation.network import Cut, Network, SimulatedTransport
from simulation.schedule import RESTART_S, Schedule
from zmqtrain.actors.client import Client
from zmqtrain.actors.link import Link
from zmqtrain.actors.task import JobActor
from zmqtrain.chief.chief import Chief
from zmqtrain.config.cluster import Cluster, Role, Task
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import RETRYABLE, ExitCode, OccupiedError, ZmqTrainError
from zmqtrain.exchanges.worker import Worker
from zmqtrain.hosting.actors import actors_of, run_all
from zmqtrain.hosting.groups import claim, serve_groups
from zmqtrain.job import Job
from zmqtrain.models.base import Dataset
from zmqtrain.planning.exchanges import BOARD
from zmqtrain.planning.plan import Plan, plan_for
from zmqtrain.server.server import ParameterServer
from zmqtrain.wire.control import RequestSave, SwitchPolicy
from zmqtrain.wire.messages import Message

MAX_LIVES = 25
HALF_OPEN_S = 0.7  # longest time that connections of a dead process look alive
CLIENT_TIMEOUT_S = 20.0


@dataclass(slots=True)
class Life:
    """A task between its start and its end.

    ``actors``: of its process. Signals stop the first one; its end ends the others.
    """

    name: str
    process: Process
    transport: SimulatedTransport
    actors: list[JobActor]
    running: asyncio.Task[int]
    is_killed: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """The end of a life that was not killed."""

    name: str
    code: int
    error: BaseException | None

    def __str__(self) -> str:
        how = f"exit code {self.code}"
        if self.error is not None:
            how = f"{type(self.error).__name__} ({self.error}), {how}"
        return f"{self.name} ended: {how}"


class SimulatedCluster:
    """Runs the tasks of a schedule and commits its faults."""

    def __init__(
        self, schedule: Schedule, job: Job, loop: VirtualLoop, network: Network,
        directory: Path, note: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Segments are in ``directory``. ``note`` gets a text for each event."""
        self.schedule = schedule
        self.job = job
        self.lives: list[Life] = []
        self.ends: list[End] = []
        self.objections: list[str] = []
        self.killed: tuple[str, ...] = ()
        self.over = asyncio.Event()
        self._loop = loop
        self._network = network
        self._note = note
        self._current: dict[str, Life] = {}
        self._asking: list[asyncio.Task[None]] = []
        self._config = _config_of(schedule, directory)
        self._plan = plan_for(job, _cluster_of(schedule), lane=schedule.lane)
        if schedule.board:  # even after a switch to another policy
            self._plan = replace(self._plan, exchange=BOARD)
        self._data: tuple[Dataset, Dataset | None] = job.data.load(None)
        self._may_start = True
        self._chiefs: list[Chief] = []  # all lives

    def start_all(self) -> None:
        self._network.commit = self._commit
        for name in self.schedule.names:
            if name not in self.schedule.absent:
                self._start(name)
        self._expired_before = self._expired()
        for fault in self.schedule.faults:
            self._loop.call_later(fault.at, self._commit_in_time, fault)

    def give_up(self, objection: str) -> None:
        """End the run, which broke an invariant."""
        self.objections.append(objection)
        self.over.set()

    @property
    def chiefs(self) -> list[Chief]:
        """All lives of the chief."""
        return self._chiefs

    @property
    def is_ended(self) -> bool:
        """Whether a chief has completed the job."""
        return any(chief.summary is not None for chief in self.chiefs)

    @property
    def has_failed(self) -> bool:
        """Whether the chief has given the job up for good."""
        return any(end.name == "chief 0" and 0 < end.code < RETRYABLE for end in self.ends)

    @property
    def expirations(self) -> float:
        """The number of expired leases of workers, on all shards."""
        return self._expired() - self._expired_before

    def _expired(self) -> float:
        """Count from the first run in this process on, since all runs share metrics."""
        servers = map(self.server, range(0 if self.schedule.hosts else self.schedule.shards))
        counters = [server.metrics.lease_expirations for server in servers]
        return sum(
            sample.value
            for counter in counters
            for sample in next(iter(counter[Role.WORKER.value].collect())).samples
            if sample.name.endswith("_total")
        )

    def server(self, index: int) -> ParameterServer:
        """Return the last life of a ps."""
        if self.schedule.hosts:
            return self._parts()[index]
        actor = self._current[self.schedule.host(index)].actors[0]
        assert isinstance(actor, ParameterServer)
        return actor

    @property
    def shards(self) -> int:
        """The number of shards in the last group of workers."""
        return len(self._parts()) if self.schedule.hosts else self.schedule.shards

    def _parts(self) -> dict[int, ParameterServer]:
        """Return the ps of the last group of workers."""
        every = [actor for life in self.lives for actor in life.actors]
        found = [actor for actor in every if isinstance(actor, ParameterServer)]
        newest = max((actor.plan.group for actor in found), default=0)
        return {actor.task.index: actor for actor in found if actor.plan.group == newest}

    async def clean_up(self) -> None:
        """Let stopped and killed tasks clean up after themselves."""
        self._may_start = False
        for life in self.lives:
            life.transport.vanish()
            life.process.spare()
            self._loop.resume(life.process)
        running = [*self._asking, *(life.running for life in self.lives)]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def waits(self) -> list[str]:
        """Return all waits, for the report of a run that does not end."""
        return [
            f"{wait.owner} has waited {wait.since_s:.1f} s for {wait.peer}: {wait.reason}"
            for life in self._current.values()
            if not life.running.done() and not life.is_killed
            for actor in life.actors
            for wait in actor.waits.snapshot()
        ]

    # Lives

    def _start(self, name: str) -> None:
        if not self._may_start:
            return
        process = Process(name, self.schedule.work_s(name))
        transport = self._network.transport(process)
        if self.schedule.hosts:
            actors: list[JobActor] = []
            running = self._loop.spawn(process, self._serve_groups(name, transport, actors))
        else:
            actors = process.context.run(self._make, name, transport)
            running = self._loop.spawn(process, _run(actors))
        life = Life(name, process, transport, actors, running)
        self.lives.append(life)
        self._current[name] = life
        self._note(f"{name} starts")
        running.add_done_callback(partial(self._ended, life))

    def _make(self, name: str, transport: SimulatedTransport) -> list[JobActor]:
        role, _, index = name.partition(" ")
        config = self._config.of(Task(Role(role), int(index)))
        return self._actors_of(config, self._plan, transport)

    def _actors_of(
        self, config: TaskConfig, plan: Plan, transport: SimulatedTransport
    ) -> list[JobActor]:
        data = None if config.role is Role.CHIEF else self._data  # a chief loads its own
        actors = actors_of(config, plan, lambda _: transport, lambda status: None, data)
        self._chiefs += [actor for actor in actors if isinstance(actor, Chief)]
        return actors

    async def _serve_groups(
        self, name: str, transport: SimulatedTransport, actors: list[JobActor]
    ) -> int:
        """Serve as the process of a worker on a host of its own."""
        config = self._config.of(Task(Role.WORKER, int(name.split()[1])))

        async def serve(plan: Plan, actors: list[JobActor]) -> int:
            actors += self._actors_of(config, plan, transport)
            with ExitStack() as stack:
                if isinstance(actors[0], Chief):
                    await claim(stack, actors[0])
                return await _run(actors)

        return await serve_groups(
            config, self._plan, serve, actors, lambda gatherer: gatherer.run(), lambda _: transport
        )

    def _ended(self, life: Life, running: asyncio.Task[int]) -> None:
        if life.is_killed or running.cancelled():
            return
        error = running.exception()
        code = running.result() if error is None else _code_of(error)
        end = End(life.name, code, error)
        self.ends.append(end)
        self._note(str(end))
        if error is not None and not isinstance(error, ZmqTrainError):
            self.give_up(f"{end}: that is a bug")
        if isinstance(error, OccupiedError):
            self.give_up(f"{end}: it has waited in vain for the chief of an earlier group to end")
        life.transport.close()
        life.process.is_stopped = True  # its threads must not affect the next life
        if code >= RETRYABLE and not self.is_ended and not self.has_failed:
            if sum(end.name == life.name for end in self.ends) < MAX_LIVES:
                self._loop.call_later(self.schedule.back_s, self._start, life.name)
                return
        if all(life.running.done() for life in self._current.values()):
            self.over.set()

    # Faults

    def _commit_in_time(self, fault: Fault) -> None:
        """Commit a fault; if the job waits for all hosts, only once it has begun."""
        every = (actor for life in self.lives for actor in life.actors)
        has_begun = any(isinstance(actor, Worker) and actor.generation for actor in every)
        if has_begun or not self.schedule.hosts:
            self._commit(fault)
        else:
            self._loop.call_later(RESTART_S, self._commit_in_time, fault)

    def _commit(self, fault: Fault) -> None:
        self._note(str(fault))
        match fault.kind:
            case "kill":
                self._kill(fault)
            case "lose":
                self._lose(self._current.pop(fault.names[0]))
            case "terminate":
                life = self._current[fault.names[0]]
                life.process.context.run(life.actors[0].stop, int(ExitCode.TERMINATED))
            case "stop":
                self._stop(self._current[fault.names[0]], fault.lasts_s)
            case "cut":
                ends_at = self._loop.time() + fault.lasts_s
                self._network.cuts.append(Cut(frozenset(fault.names), ends_at, fault.mild))
            case "break":
                self._network.break_connections(fault.names[0])
            case "storm":
                self._network.weather = fault.weather or self.schedule.weather
                calm = self.schedule.weather
                self._loop.call_later(fault.lasts_s, setattr, self._network, "weather", calm)
            case "switch":
                self._ask(SwitchPolicy(fault.spec))
            case "save":
                self._ask(RequestSave())
            case "interrupt":
                chief = self._current["chief 0"]
                if not chief.is_killed:
                    chief.process.context.run(chief.actors[0].stop, int(ExitCode.INTERRUPTED))

    def _lose(self, life: Life) -> None:
        self._gone(life)
        life.transport.vanish()
        unlock(life.process)

    def _kill(self, fault: Fault) -> None:
        life = self._current[fault.names[0]]
        chief = self._current.get("chief 0", life)
        if life.is_killed or life.running.done() or chief.running.done() or self.is_ended:
            return  # a task that starts after the end of a job waits in vain
        # A stopped process runs no lines. A doomed one is not stopped first: together that would
        # take longer than others wait for a ps.
        if fault.lines and not life.process.is_stopped:
            life.process.die_after(fault.lines, partial(self._die, life, fault))
            return
        self._gone(life)
        # The next life needs the address of this one.
        half_open_s = min(HALF_OPEN_S, fault.lasts_s / 2) if fault.mild else 0.0
        self._loop.call_later(half_open_s, life.transport.vanish)
        self._loop.call_later(fault.lasts_s, self._start_again, life, fault)
        unlock(life.process)

    def _die(self, life: Life, fault: Fault) -> Callable[[], None]:
        """Kill a process in the middle of a callback; the effects of unwinding are undone."""
        self._gone(life)
        life.transport.vanish()
        memory = memory_of(life.process)
        Context().run(self._loop.call_later, fault.lasts_s, self._start_again, life, fault)

        def clean_up() -> None:
            put_back(memory)
            unlock(life.process)

        return clean_up

    def _start_again(self, life: Life, fault: Fault) -> None:
        if fault.returns_as:
            del self._current[life.name]
        self._start(fault.returns_as or life.name)

    def _gone(self, life: Life) -> None:
        self._note(f"{life.name} is killed")
        self.killed += (life.name,)
        life.is_killed = True
        life.process.spare()
        life.process.is_stopped = True

    def _stop(self, life: Life, lasts_s: float) -> None:
        if not life.is_killed and not life.process.is_doomed:
            life.process.is_stopped = True
            self._loop.call_later(lasts_s, self._continue, life)

    def _continue(self, life: Life) -> None:
        if not life.is_killed:
            self._loop.resume(life.process)

    def _ask(self, message: Message) -> None:
        process = Process("client")
        asking = self._asked(message, self._network.transport(process))
        self._asking.append(self._loop.spawn(process, asking))

    async def _asked(self, message: Message, transport: SimulatedTransport) -> None:
        client = Client(1, CLIENT_TIMEOUT_S)
        link = Link("ps 0", transport.connect("ipc://simulated/0"), client)
        try:
            reply = await link.request(message, reason="", timeout_s=CLIENT_TIMEOUT_S)
            self._note(f"{message} -> {reply.message}")
        except ZmqTrainError as error:
            self._note(f"{message} -> {error}")
        finally:
            link.close()


def _cluster_of(schedule: Schedule) -> Cluster:
    addresses = tuple(f"ipc://simulated/{i}" for i in range(schedule.ps or schedule.workers))
    ps = addresses if schedule.ps else ()
    members = () if schedule.ps else addresses
    return Cluster(ps, schedule.workers, not schedule.hosts, members)


def _config_of(schedule: Schedule, directory: Path) -> TaskConfig:
    return TaskConfig(
        role=Role.CHIEF,
        job="simulated",
        ps=("ipc://simulated/0",),
        lane=schedule.lane,
        segment_dir=str(directory),
        crash_safe=not schedule.forgets,
        on_term="leave" if schedule.leaves else "end",
        **schedule.timing.model_dump(),
    )


async def _run(actors: list[JobActor]) -> int:
    # A further task for a lone actor would change the draws of seeds.
    return await actors[0].run() if len(actors) == 1 else (await run_all(actors))[0]


def _code_of(error: BaseException) -> int:
    return int(error.exit_code) if isinstance(error, ZmqTrainError) else int(ExitCode.CRASH)
