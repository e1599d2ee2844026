"""A ps's handlers for joins, leaves, heartbeats and leases."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import fields

from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.actors.waits import within
from zmqtrain.config.cluster import Role
from zmqtrain.config.timing import Timing
from zmqtrain.coordination.peers import Peer, PeerTable
from zmqtrain.errors import FencedError, ProtocolError, RefusedError
from zmqtrain.fingerprint import DATA, fingerprint_difference, remedy_of_difference
from zmqtrain.observe.metrics import Phases
from zmqtrain.server.state import ShardState
from zmqtrain.store.segment_layout import COUNT_LIMIT, INCARNATION
from zmqtrain.units import shortened
from zmqtrain.wire import chunks, messages
from zmqtrain.wire.control import Shutdown

MAX_WAITS = 16  # of one task, shown in the status
PHASES = len(fields(Phases))
LONGEST_S = 1e12  # of a time in a heartbeat

log = logging.getLogger(__name__)

FAREWELL_S = 2.0  # between two checks whether workers that have not left still live


def check_times(beat: messages.Heartbeat) -> None:
    """Check the times and counts of a heartbeat, from which other users' commands compute.

    Raises:
        ProtocolError: one is not a number or too large, or there are too few times or too many.
    """
    untils = (wait.until_s for wait in beat.waits if wait.until_s is not None)
    counts = beat.progress.batches, beat.progress.nbytes, beat.progress.local_step
    if not all(0 <= count < COUNT_LIMIT for count in counts):
        raise ProtocolError(f"a heartbeat with the counts {counts}; expected numbers from 0 on")
    times = [*beat.phases_s, *(wait.since_s for wait in beat.waits), *untils]
    if len(beat.phases_s) not in (0, PHASES) or not all(0 <= each < LONGEST_S for each in times):
        raise ProtocolError(
            f"a heartbeat with the times {shortened([*map(str, times)])}; expected seconds from 0 "
            f"on, those of {PHASES} phases or of none"
        )


class PeerHandlers:
    """Handles joins and leaves, and drops the requests of lost tasks."""

    def __init__(self, actor: JobActor, state: ShardState, peers: PeerTable) -> None:
        self._state = state
        self._peers = peers
        self._metrics = actor.metrics
        self.fingerprint = dict(actor.fingerprint)  # and the data, once a task has joined
        # Tasks may map the memory of this name.
        tables, is_open = state.shard.tables, actor.lane != "tcp"
        self._segment = state.shard.segment.name if is_open else ""
        self._tables = tables.memory.name if is_open and tables is not None else ""
        self._shutdown: Shutdown | None = None
        self._workers_gone = asyncio.Event()

    def on_join(self, request: Request, message: messages.Join) -> tuple[Peer | None, Peer | None]:
        """Return the life that ended and the one that began, each None if there is none."""
        sender = request.sender
        self._check_job(str(sender), message.fingerprint)
        before = self._peers.get(sender.role, sender.index)
        peer = self._peers.join(request, message)
        if peer is None:
            return None, None
        if DATA in message.fingerprint:
            self.fingerprint[DATA] = message.fingerprint[DATA]
        if peer is not before:
            self._state.shard.segment.words[INCARNATION] = self._peers.newest
            if before is not None:
                self._gone(before)
            if peer.is_worker:
                self._state.join(peer)
        self._count()
        request.reply(
            messages.Welcome(peer.incarnation, self._segment, chunks.WINDOW_NBYTES, self._tables)
        )
        return (before, peer) if peer is not before else (None, None)

    def on_map_segment(self, request: Request, message: messages.MapSegment) -> None:
        """Note the lane of a task that has reached the segment; give a worker a buffer there."""
        peer, state, buffer = self._peers.member(request), self._state, -1
        if message.nonce:  # else it has asked whether it is a member
            if message.nonce != state.shard.segment.nonce:
                raise RefusedError(f"{request.sender} has not reached the segment of {state.task}")
            peer.lanes = message.lane
            if peer.is_worker:
                worker = state.workers[peer.index]
                worker.lane = message.lane
                state.assign_buffer(worker)
                state.keep(worker)
                buffer = worker.buffer
        request.reply(messages.Mapped(buffer))

    def on_leave(self, request: Request, message: messages.Leave) -> Peer:
        """Return the task that has left."""
        peer = self._peers.member(request)
        peer.gone = peer.left = True
        log.info("%s left: %s", peer, message.reason)
        self._gone(peer)
        if request.envelope.request_id:
            request.reply(messages.Done())
        return peer

    def on_heartbeat(self, request: Request, beat: messages.Heartbeat) -> None:
        peer = self._peers.member(request)
        check_times(beat)
        peer.waits = beat.waits[:MAX_WAITS]
        peer.finished, peer.saved_step = beat.finished, beat.saved_step
        peer.phases_s, peer.progress = beat.phases_s, beat.progress
        worker = self._state.workers.get(peer.index) if peer.is_worker else None
        pushes = (worker.received, worker.answered) if worker is not None else ()
        request.reply(messages.HeartbeatReply(*pushes))
        if self._shutdown is not None and peer.is_worker:
            request.send(self._shutdown)  # it was lost, or the worker joined later

    def end_leases(self) -> list[Peer]:
        """Return the tasks whose lease has run out since the last call, and which count as left."""
        ended = list(self._peers.expired())
        for peer in ended:
            then = "the others go on without it" if peer.died else "it has left"
            log.warning("%s %s: %s", peer, peer.absence, then)
            self._metrics.lease_expirations[peer.role].inc()
            self._gone(peer)
        return ended

    def close(self, shutdown: Shutdown) -> None:
        """Admit no new task, and send every worker the shutdown."""
        self._shutdown = shutdown
        self._peers.is_closed = True
        for peer in self._peers:
            # A worker whose lease ran out may still live and try to join an ended ps.
            if peer.is_worker and peer.contact is not None:
                peer.contact.send(shutdown)
        self._workers_gone.clear()
        self._note_if_empty()

    async def drain(self, timing: Timing) -> None:
        """Wait until the workers have left, which takes time on a slow link."""
        patience_s = max(FAREWELL_S, 3 * timing.heartbeat_s)
        deadline = time.monotonic() + timing.peer_timeout_s
        while not await within(FAREWELL_S, self._workers_gone) and time.monotonic() < deadline:
            if all(peer.silent_s > patience_s for peer in self._peers.workers()):
                return

    def _check_job(self, sender: str, theirs: dict[str, str]) -> None:
        """Check that a task with this fingerprint runs the same job.

        A ps loads no data: it expects the data of the first task from all others.
        """
        task, ours = self._state.task, self.fingerprint
        difference = fingerprint_difference(theirs, ours, f"at {sender}", f"at {task}")
        if difference:
            raise RefusedError(
                f"{sender} runs another job than {task}: {difference}. "
                f"{remedy_of_difference(theirs, ours)}"
            )

    def _gone(self, peer: Peer) -> None:
        """Drop the pending request of a task that has left."""
        if peer.is_worker:
            worker = self._state.leave(peer.index)
            if worker is not None:
                text = f"{peer} was silent for too long and is no longer a member"
                worker.refuse(FencedError(text))
        self._note_if_empty()
        self._count()

    def _note_if_empty(self) -> None:
        if not any(self._peers.workers()):
            self._workers_gone.set()

    def _count(self) -> None:
        for role in Role:
            here = sum(peer.role == role and not peer.gone for peer in self._peers)
            self._metrics.connected_peers[role.value].set(here)
