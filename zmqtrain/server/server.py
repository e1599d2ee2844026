"""The parameter server: `python -m zmqtrain.roles.ps`.

A gradient's way: the receiver checks it and stages it where it lies in the segment, the direction
(leader or follower) says when it counts, the orders are carried out one after another on the
shard, and the release goes back as the reply to the push.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from pathlib import Path

import numpy as np

from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.actors.waits import PATIENCE_S
from zmqtrain.compute.offload import DaemonExecutor
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.coordination.membership import Peer, Peers
from zmqtrain.errors import (
    ConfigError,
    FencedError,
    OrphanedError,
    PeerLostError,
    RefusedError,
    ZmqTrainError,
)
from zmqtrain.job import DATA, Job, fingerprint_difference
from zmqtrain.observe.logs import StateLogger
from zmqtrain.optim import AVERAGE, Update
from zmqtrain.server.buffers import GradientBuffers
from zmqtrain.server.direction import Direction, Pending
from zmqtrain.server.executor import Executor
from zmqtrain.server.receiver import WINDOW_NBYTES, Receiver
from zmqtrain.server.recovery import packed_peer, recover
from zmqtrain.server.shard_memory import (
    close_or_keep,
    make_shard,
    note_alive,
    open_segment,
    tell_of_memory,
)
from zmqtrain.store import checkpoint
from zmqtrain.store.manifest import read_manifest
from zmqtrain.store.marks import Marks
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import GENERATION, INCARNATION
from zmqtrain.store.shard import Shard, segment_layout
from zmqtrain.transport.base import HIGH_WATER_MARK, Transport
from zmqtrain.wire import chunks as chunks
from zmqtrain.wire.messages import (
    Alive,
    Done,
    Heartbeat,
    Initialize,
    Join,
    Leave,
    Parameters,
    Read,
    Shutdown,
    Welcome,
)

FAREWELL_S = 2.0  # between two looks whether workers that have not said goodbye still live
MAX_WAITS = 16  # of one task, that are told of in the status

log = logging.getLogger(__name__)


class ParameterServer(JobActor):
    """One shard of the model, at one address."""

    def __init__(self, config: TaskConfig, job: Job, transport: Transport) -> None:
        super().__init__(config, job, transport)
        self._segment: Segment | None = None
        self.shard: Shard  # from the moment it listens, as are the marks
        self.marks: Marks
        self.config = config
        self.pending: dict[int, Pending] = {}
        self.restored_from: Path | None = None
        self._data = ""  # what the first task that loaded the data said of it
        self.shutdown: Shutdown | None = None
        self._shut_down = asyncio.Event()
        self._workers_gone = asyncio.Event()
        self.started_at = time.monotonic()
        self.executor = Executor(self)
        self.direction: Direction
        self.on(Join, self._on_join)
        self.on(Leave, self._on_leave)
        self.on(Heartbeat, self._on_heartbeat)
        self.on(Initialize, self._on_initialize)
        self.on(Read, self._on_read)
        self.on(Shutdown, self._on_shutdown)
        self.gradients = GradientBuffers(self)
        self.peers = Peers(config.lease_s, self.shards, self.gradients.has_died)
        self.receiver = Receiver(self)
        self._states = StateLogger(log)

    @property
    def initialised(self) -> bool:
        return self.generation > 0

    def ready(self) -> tuple[bool, str]:
        """Say whether this ps can serve, and why not."""
        return self.initialised, "serving" if self.initialised else "waiting for the chief"

    async def main(self) -> int:
        from zmqtrain.coordination.leader import Leader
        from zmqtrain.server.follower import Follower

        layout, update = self.job.layouts(self.shards)[self.task.index], self.job.update()
        bound = self.listen(
            self.config.bind_endpoint, HIGH_WATER_MARK + 2 * chunks.count(layout.size)
        )
        segment, is_left = open_segment(self, segment_layout(layout, update), bound.address)
        self._segment = segment
        self.shard = make_shard(self, layout, segment)
        self.marks = Marks(segment)
        tell_of_memory(self, bound.address)
        self.direction = Follower(self) if self.task.index else Leader(self)
        self.metrics.role_state.set("joining")
        if is_left:
            recover(self)
            self.metrics.role_state.set("training")
        if not self.shard.rule.fused:
            self.spawn(self._fuse(update))
        self.spawn(self._watch())
        await self.stopping.wait()
        return await self._farewell()

    @property
    def is_crash_safe(self) -> bool:
        """Whether the shard is to survive this process; what a GPU holds does not."""
        return self.config.crash_safe and self.job.ps_device == "cpu"

    async def _fuse(self, update: Update) -> None:
        """Change to compiled kernels. Until they are loaded, NumPy gives the same, more slowly."""
        memory, guarded = np.empty(0, np.float32), self.shard.safe
        load = partial(update.warm_up, memory, guarded=guarded)
        await asyncio.get_running_loop().run_in_executor(DaemonExecutor(), load)
        self.executor.after_orders(partial(self.shard.bind, update))

    def release(self, error: BaseException | None) -> None:
        self.executor.close()
        if self._segment is not None:
            close_or_keep(self, self._segment, error)

    async def _farewell(self) -> int:
        """Leave: at the chief's word, or, after SIGTERM, when it does not come in time."""
        if not await _within(self.timing.grace_s, self._shut_down) or self.shutdown is None:
            log.warning("leaving without the chief's shutdown")
            return self.stop_code
        await self._drain_workers()
        log.info("the run is over: %s", self.shutdown.reason)
        return self.shutdown.exit_code

    async def _drain_workers(self) -> None:
        """Wait for the workers' goodbyes, which take their time on a slow link."""
        patience_s = max(FAREWELL_S, 3 * self.timing.heartbeat_s)
        deadline = time.monotonic() + self.timing.peer_timeout_s
        while not await _within(FAREWELL_S, self._workers_gone) and time.monotonic() < deadline:
            workers = list(self.peers.workers())
            if all(peer.silent_s > patience_s for peer in workers):
                return

    async def _watch(self) -> None:
        """Expire leases; give up if no chief comes."""
        interval = self.timing.lease_s / 5
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval)
            note_alive(self.shard.segment)
            if time.monotonic() - before > interval + self.timing.lease_s / 2:
                self.peers.renew_all()  # it was this process that slept
            for peer in self.peers.expired():
                log.warning("%s %s: it has left", peer, peer.absence)
                self.metrics.lease_expirations[peer.role].inc()
                self._gone(peer)
            for request in self.peers.settle_contests():
                self._dispatch(request)
            self._check_chief()
            self.direction.watch()

    def _check_chief(self) -> None:
        chief = self.peers.get("chief", 0)
        heard_at = chief.heard_at if chief is not None else self.started_at
        silent_s = time.monotonic() - heard_at
        self._tell_of_chief(chief, silent_s)
        if silent_s < self.timing.join_timeout_s:
            return
        if chief is None:
            raise PeerLostError(
                f"no chief has joined within {silent_s:.0f} s: start one (python -m "
                "zmqtrain.roles.chief), or raise --join-timeout-s"
            )
        raise OrphanedError(f"the chief has been silent for {silent_s:.0f} s and ended no run")

    def _tell_of_chief(self, chief: Peer | None, silent_s: float) -> None:
        """Log that there is no chief, once, and not before that is worth a line."""
        limit_s = self.timing.join_timeout_s
        if chief is None and silent_s > PATIENCE_S:
            text = f"waiting for chief 0: it has not joined; it may take {limit_s:g} s in all"
            self._states.state("chief", text)
        elif chief is not None and silent_s > self.timing.lease_s:
            text = f"{chief} is silent; training goes on without it, for up to {limit_s:g} s"
            self._states.state("chief", text, logging.WARNING)
        elif chief is not None:
            self._states.state("chief", f"{chief} is here", logging.DEBUG)

    # Membership

    def _on_join(self, request: Request, message: Join) -> None:
        self._check_job(str(request.sender), message.fingerprint)
        before = self.peers.get(request.sender.role, request.sender.index)
        peer = self.peers.join(request, message)
        if peer is None:
            return
        self._data = message.fingerprint.get(DATA, self._data)
        if peer is not before:
            self.shard.segment.words[INCARNATION] = self.peers.newest
            if before is not None:
                self._gone(before)
            if peer.is_worker:
                self.marks.join(peer.index, peer.incarnation, packed_peer(peer))
            self.direction.joined(peer)
        self._count_peers()
        segment = self.shard.segment.name if self.config.lane != "tcp" else ""
        request.reply(Welcome(peer.incarnation, segment, WINDOW_NBYTES))

    def _check_job(self, sender: str, theirs: dict[str, str]) -> None:
        """Raise RefusedError unless a task with this fingerprint runs the same job.

        A ps loads no data: it expects of all tasks what the first one said of theirs.
        """
        ours = self.fingerprint | ({DATA: self._data} if self._data else {})
        difference = fingerprint_difference(theirs, ours, f"at {sender}", f"at {self.task}")
        if difference:
            raise RefusedError(
                f"{sender} runs another job than {self.task}: {difference}. Start every task with "
                "the same job file, data and options"
            )

    def _on_leave(self, request: Request, message: Leave) -> None:
        peer = self.peers.member(request)
        peer.gone = True
        log.info("%s left: %s", peer, message.reason)
        self._gone(peer)
        if request.envelope.request_id:
            request.reply(Done())

    def _gone(self, peer: Peer) -> None:
        """Settle what a task leaves behind."""
        role, index = peer.name
        if role == Role.WORKER:
            pending = self.pending.pop(index, None)
            self.marks.leave(index)
            if pending is not None and pending.request is not None:
                pending.request.refuse(
                    FencedError(f"{peer} was silent for too long and is no longer a member")
                )
        self.direction.left(peer)
        self._note_farewells()
        self._count_peers()

    def _count_peers(self) -> None:
        for role in Role:
            here = sum(peer.role == role and not peer.gone for peer in self.peers)
            self.metrics.connected_peers[role.value].set(here)

    def _note_farewells(self) -> None:
        if not any(self.peers.workers()):
            self._workers_gone.set()

    def _on_heartbeat(self, request: Request, beat: Heartbeat) -> None:
        peer = self.peers.member(request)
        peer.waits = beat.waits[:MAX_WAITS]
        peer.finished, peer.saved_step = beat.finished, beat.saved_step
        request.reply(Alive(peer.received, peer.answered))
        if self.shutdown is not None and peer.is_worker:
            request.send(self.shutdown)  # it was lost, or the worker has joined since

    # Parameters in and out

    def _on_initialize(self, request: Request, message: Initialize) -> None:
        self.peers.member(request)
        self.executor.after_orders(partial(self._initialize, request, message))

    def _initialize(self, request: Request, message: Initialize) -> None:
        """Begin a generation, unless it has begun; nothing of the one before is under way."""
        if request.envelope.generation == self.generation and self.initialised:
            request.reply(Parameters(self.shard.version))
            return
        try:
            checkpoint.check_found(message.logdir)
        except ConfigError as error:
            request.refuse(error)
            return
        self._end_generation()
        words = self.shard.segment.words
        words[GENERATION] = 0  # until all is in place, there is nothing to go on from
        try:
            self._fill_shard(message.checkpoint)
        except ZmqTrainError as error:
            self.metrics.checkpoint_failures.restore.inc()
            request.refuse(error)
            return
        self.generation = request.envelope.generation
        origin = message.checkpoint or f"seed {self.job.seed}"
        log.info(
            "generation %d begins at version %d, from %s",
            self.generation,
            self.shard.version,
            origin,
        )
        self.metrics.parameter_version.set(self.shard.version)
        self.metrics.role_state.set("training")
        self.direction.generation_began()
        words[GENERATION] = self.generation if self.shard.segment.path is not None else 0
        for worker, pending in list(self.pending.items()):
            self.direction.arrived(worker, pending)
        request.reply(Parameters(self.shard.version))

    def _fill_shard(self, checkpoint_path: str | None) -> None:
        """Put initial parameters into the shard, or those of a checkpoint."""
        layout = self.shard.layout
        if checkpoint_path is None:
            flat = np.empty(layout.size, np.float32)
            layout.gather(self.job.initial_parameters(), flat)
            self.shard.initialize(flat)
            return
        self.restored_from = Path(checkpoint_path)
        names = [slot.name for slot in self.shard.rule.slots]
        manifest = read_manifest(self.restored_from)
        for mark in manifest.worker_marks.values():
            self.peers.outlive(mark.incarnation)
        flat, slots, version = checkpoint.read_shard(self.restored_from, manifest, layout, names)
        self.shard.initialize(flat, slots, version)

    def _end_generation(self) -> None:
        """Have the workers of an earlier generation join again; their gradients belong to it."""
        if not self.initialised:
            return
        for worker, pending in self.pending.items():
            if pending.request is not None:
                text = f"a new generation begins: worker {worker} joins again"
                pending.request.refuse(FencedError(text))
        self.pending.clear()
        self.marks.clear()
        self.peers.forget_workers()

    def _on_read(self, request: Request, message: Read) -> None:
        if not self.initialised:
            self.peers.member(request)  # a chief that knew the life before hears that it is over
            raise RefusedError(f"{self.task} holds no parameters yet")
        if message.average and AVERAGE not in self.shard.segment.slots:
            raise RefusedError("the job keeps no moving average (its field moving_average)")
        self.executor.after_orders(partial(self._show, request, message))

    def _show(self, request: Request, message: Read) -> None:
        shown = Parameters(self.shard.version)
        if not message.values:
            request.reply(shown)
            return
        flat = self.shard.segment.slots[AVERAGE] if message.average else self.shard.parameters
        request.reply_with(shown, flat.copy())  # updates go on while it is on its way

    # The end

    def _on_shutdown(self, request: Request, message: Shutdown) -> None:
        self.peers.member(request)
        self.shutdown = message
        self.peers.is_closed = True
        self.metrics.role_state.set("finished")
        for peer in self.peers:
            # One whose lease ran out may live, and join again when nobody is there any more.
            if peer.is_worker and peer.contact is not None:
                peer.contact.send(message)
        request.reply(Done())
        self._shut_down.set()
        self._workers_gone.clear()
        self._note_farewells()
        self.stop(message.exit_code)


async def _within(limit_s: float, event: asyncio.Event) -> bool:
    """Wait for an event; say whether it came in time."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
