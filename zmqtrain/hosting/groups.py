"""Going on without a worker that is lost for good, where workers on several hosts host the ps.

Each worker's process runs its actors for one group of workers after another. A group is over when a
part of the parameters is lost, with the worker that hosted it. The remaining workers then agree on
the next group (`coordination/group.py`), the parameters are cut anew, and the chief, on the lowest
worker, begins a new generation from the newest checkpoint. So only the logdir outlives a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.actors.waits import within
from zmqtrain.config.cluster import Role, Task, bind_endpoint, connect_endpoint
from zmqtrain.config.options import names_of
from zmqtrain.config.task import TaskConfig
from zmqtrain.coordination.group import Gathering, Group
from zmqtrain.errors import (
    CheckpointError,
    ConfigError,
    GroupOverError,
    OccupiedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
)
from zmqtrain.hosting.succession import Succession
from zmqtrain.observe.logs import StateLogger
from zmqtrain.planning.plan import Plan
from zmqtrain.server.server import ParameterServer
from zmqtrain.store.checkpoint import checkpoints_directory
from zmqtrain.store.logdir import claimed, last_generation, newest_group, write_group
from zmqtrain.transport.base import Transport
from zmqtrain.wire.codec import Sender
from zmqtrain.wire.control import Gather, HandedOver, HandOver
from zmqtrain.wire.messages import Message

CLAIM_S = 1.0  # between two attempts to claim the logdir

log = logging.getLogger(__name__)

Serve = Callable[[Plan, list[JobActor]], Awaitable[int]]
"""Runs the actors of this process for one group, adds them to the list, returns the exit code."""


def may_regroup(config: TaskConfig, plan: Plan) -> bool:
    """Return whether a job can go on without a lost worker: its hosts share only the logdir.

    Raises:
        ConfigError: a timeout would end the job before it goes on.
    """
    may = (
        plan.is_on_workers
        and not plan.exchange.is_board
        and not plan.has_chief
        and plan.job.logdir is not None
        and len(plan.worker_addresses) > 1
        and bool(plan.address_of(config.task))  # others have none, and can wait for none
        and not plan.is_of_one_run
    )
    if may and config.join_timeout_s < config.peer_timeout_s:
        raise ConfigError(
            f"{names_of('join_timeout_s')} is {config.join_timeout_s:g} and "
            f"{names_of('peer_timeout_s')} is {config.peer_timeout_s:g}; expected the first to be "
            "at least as long: to go on without a lost worker, each of the others has to give it "
            "up first; raise it"
        )
    return may


class Gatherer(JobActor):
    """A worker that has given its group up, and joins the next group, or makes it with others.

    ``found`` is that group, once :meth:`main` has returned without a signal.
    """

    def __init__(
        self,
        config: TaskConfig,
        plan: Plan,
        transport: Transport,
        group: Group,
        server: ParameterServer | None = None,
        fingerprint: Mapping[str, str] | None = None,
    ) -> None:
        """``server``, ``fingerprint``: the ps that it hosted in that group, and the job's there."""
        super().__init__(config, plan.among_workers(), transport)
        self.found: Group | None = None
        remains = server.orphan if server is not None else None
        lost = plan.in_group(group.number, group.members)
        self.fingerprint = {**(fingerprint or lost.fingerprint())}
        self._succession = Succession(self, lost, remains)
        self._saving: asyncio.Future[None] | None = None
        self._saved_with: tuple[int, ...] = ()  # the workers of the last attempt to save
        self._config, self._logdir = config, self.job.logdir or ""
        self._give_up(group, server.heard_at if server is not None else {})
        self._has_news = asyncio.Event()
        self.handlers = dict.fromkeys(get_args(Message), self._answer) | {
            Gather: self.on_gather,
            HandOver: self._succession.on_hand_over,
            HandedOver: lambda request, message: self._succession.take(
                request.sender.index, message
            ),
        }

    async def main(self) -> int:
        """Gather.

        Raises:
            PeerLostError: there is no quorum of the group.
            CheckpointError: the agreed group cannot be read or written in time.
        """
        config, timing, states = self._config, self.timing, StateLogger(log)
        addresses = self.plan.worker_addresses
        self.listen(bind_endpoint(addresses[config.index], config.bind))
        for worker, address in enumerate(addresses):
            if worker != config.index:
                self.link(Task(Role.WORKER, worker), connect_endpoint(address))
        # Others may be restarted meanwhile, and first wait to join the group that is over.
        until = time.monotonic() + timing.join_timeout_s + 3 * timing.lease_s
        try:
            while not (self.stopping.is_set() or self.found):
                self._has_news.clear()
                for link in self.links:
                    link.send(self._state())
                is_late = time.monotonic() > until
                try:
                    await self._propose()
                except CheckpointError as error:  # of a file server, it may pass
                    if is_late:
                        raise
                    states.state("logdir", f"{error}; trying again", logging.WARNING)
                if not self.found and is_late and self._saving is None:
                    raise PeerLostError(self._lack())
                await within(timing.heartbeat_s, self._has_news)
        finally:
            if self._saving is not None:
                self._saving.cancel()
            self._succession.close()
        return self.stop_code

    def stop(self, exit_code: int) -> None:
        super().stop(exit_code)
        self._has_news.set()

    async def _propose(self) -> None:
        if self._saving is not None:
            if not self._saving.done():
                return
            saving, self._saving = self._saving, None
            saving.result()
        proposal = self._gathering.proposal(time.monotonic())
        if proposal is None or self.found:
            return
        if proposal.members != self._saved_with:
            self._saved_with = proposal.members
            self._saving = asyncio.ensure_future(self._succession.save(proposal.members))
            self._saving.add_done_callback(lambda _: self._has_news.set())
        else:
            everyone = self.plan.worker_addresses
            addresses = [everyone[worker] for worker in proposal.members]
            await asyncio.to_thread(write_group, self._logdir, proposal.number, addresses)
            self._find(await asyncio.to_thread(_newest, self._logdir, everyone))

    def _give_up(self, group: Group, heard_at: Mapping[int, float]) -> None:
        self._known = group
        self._going_on: set[int] = set()  # workers whose parts go on in this group
        self._gathering = Gathering(
            self._config.index, group, self.timing.lease_s, time.monotonic(), heard_at
        )

    def _find(self, group: Group) -> None:
        self.found = group
        self._has_news.set()

    def _state(self) -> Gather:
        hears, last = self._gathering.heard(time.monotonic()), self._succession.last
        return Gather(self._known.number, self._known.members, True, hears, last)

    def ready(self, *, everyone: bool = False) -> tuple[bool, str]:
        return False, "looking for the workers that are left"

    def on_stranger(self, request: Request, error: RefusedError) -> None:
        self._answer(request, request.envelope.message)

    def _answer(self, request: Request, message: Message) -> None:
        """Answer a task that its group is over, and a client with the reason."""
        if request.sender.role == "client":
            request.refuse(
                PeerLostError(f"{self.task} looks for workers to go on with: {self._lack()}")
            )
        else:
            request.send(self._state())

    def on_gather(self, request: Request, message: Gather) -> None:
        count, named = len(self.plan.worker_addresses), {*message.members, request.sender.index}
        if not message.members or not all(0 <= each < count for each in named):
            raise ProtocolError(f"{message.members} is not a group of {count} workers")
        theirs = Group(message.group, message.members)
        if self.found or theirs.number < self._known.number:
            self._answer(request, message)
        elif not message.gives_up:
            if theirs.number > self._known.number or self._all_go_on(request.sender):
                self._find(theirs)
        elif theirs.number > self._known.number:
            self._give_up(theirs, {})
        if message.gives_up and theirs == self._known:
            self._going_on.discard(request.sender.index)
            self._succession.note(request.sender.index, message.last)
            if self._gathering.note(request.sender.index, message.hears, time.monotonic()):
                self._has_news.set()
            if self._config.index not in message.hears:
                self._answer(request, message)

    def _all_go_on(self, sender: Sender) -> bool:
        """Note that the sender's part goes on, and return whether all parts do.

        A single part may not know yet that another one is lost.
        """
        hosts = self.plan.in_group(self._known.number, self._known.members).hosts
        if sender.role == Role.PS and sender.index < len(hosts):
            self._going_on.add(hosts[sender.index])
        return len(self._going_on) == len(hosts)

    def _lack(self) -> str:
        heard = self._gathering.heard(time.monotonic())
        names = ", ".join(f"worker {worker}" for worker in heard) or "no other worker"
        members = self._known.members
        missing = [each for each in members if each not in heard and each != self.task.index]
        absent = ", ".join(f"worker {worker}" for worker in missing) or "none of them"
        half = f", or {len(members) // 2} with worker {members[0]}" * (len(members) % 2 == 0)
        return (
            f"heard of {names}, but not of {absent}; it takes {len(members) // 2 + 1} of the "
            f"{len(members)} workers of group {self._known.number}{half}, to go on without the rest"
        )


async def serve_groups(
    config: TaskConfig,
    plan: Plan,
    serve: Serve,
    actors: list[JobActor],
    gather: Callable[[Gatherer], Awaitable[int]],
    transport: Callable[[Plan], Transport],
) -> int:
    """Serve one group after another; return the exit code of the process.

    ``actors``: gets those of the last group. ``gather`` runs the actor between two groups, over a
    ``transport`` that reaches all workers.

    Raises:
        ZmqTrainError: as ``serve`` does, and if there is no quorum for another group.
    """
    logdir = plan.job.logdir or ""
    group = await asyncio.to_thread(_newest, logdir, plan.worker_addresses)
    while True:
        members = group.members
        if group.number > 1:
            workers = ", ".join(f"worker {worker}" for worker in members)
            log.warning("group %d of workers carries the job: %s", group.number, workers)
        actors.clear()
        try:
            return await serve(plan.in_group(group.number, members), actors)
        except PeerLostError as lost:
            generation = max((max(a.generation, a.known_generation) for a in actors), default=0)
            await asyncio.to_thread(_check_begun, logdir, generation, lost)
            if any(actor.stopping.is_set() for actor in actors):
                raise  # a signal, or the end of the job, came first
            log.warning("%s; looking for the workers that are left", lost)
            fingerprint = actors[-1].fingerprint  # of the worker, which knows the data
            reach = transport(plan.among_workers())
            gatherer = Gatherer(config, plan, reach, group, _server_among(actors), fingerprint)
            try:
                code = await gather(gatherer)
            except PeerLostError as lack:
                raise PeerLostError(f"{lost}; {lack}") from None
            if gatherer.found is None or gatherer.stopping.is_set():
                return code
            group = gatherer.found
        finally:
            server = _server_among(actors)
            if server is not None and server.orphan is not None:
                server.orphan.close()


def _server_among(actors: Iterable[JobActor]) -> ParameterServer | None:
    return next((actor for actor in actors if isinstance(actor, ParameterServer)), None)


def _newest(logdir: str, addresses: Sequence[str]) -> Group:
    """Return the group that carries the job, by the logdir; else all workers, which begin anew."""
    number, found = newest_group(logdir)
    if found and set(found) <= set(addresses):
        return Group(number, tuple(sorted(map(addresses.index, found))))
    return Group(number + 1, tuple(range(len(addresses))))


def _check_begun(logdir: str, generation: int, lost: PeerLostError) -> None:
    """Raise PeerLostError if the job has not begun, or its newest checkpoints are not here."""
    known = last_generation(checkpoints_directory(Path(logdir)))
    if not known and not generation:
        raise lost
    if known < generation:
        raise PeerLostError(
            f"{lost}; the job cannot go on here, for {logdir} is of generation {known} instead of "
            f"{generation}; expected the logdir of worker 0; put it where all hosts see it"
        )


async def claim(stack: contextlib.ExitStack, chief: JobActor) -> None:
    """Claim the logdir for the chief of a group, unless it is stopped first.

    The claim of a dead host may last for a while, and so may that of a chief of an earlier group,
    which gives it up once it finds a later group in the logdir.

    Raises:
        OccupiedError: another job's chief runs there.
    """
    until = time.monotonic() + (chief.timing.peer_timeout_s if chief.plan.group > 1 else 0.0)
    while not chief.stopping.is_set():
        try:
            stack.enter_context(claimed(chief.job.logdir))
        except OccupiedError:
            if time.monotonic() >= until:
                raise
            await within(CLAIM_S, chief.stopping)
        else:
            if chief.plan.group:
                chief.add_background_task(partial(_until_later_group, chief))
            return


async def _until_later_group(chief: JobActor) -> None:
    """Raise GroupOverError once the logdir names a later group, whose chief waits for the claim."""
    logdir = chief.job.logdir or ""
    while True:
        await asyncio.sleep(CLAIM_S)
        with contextlib.suppress(CheckpointError):  # it may pass
            number, _ = await asyncio.to_thread(newest_group, logdir)
            if number > chief.plan.group:
                raise GroupOverError(
                    f"group {number} of workers carries the job, according to {logdir}"
                )
