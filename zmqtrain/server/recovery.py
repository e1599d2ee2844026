"""What a ps finds in the segment of the process before it: workers, pushes, answers."""

from __future__ import annotations

import logging
import time

import msgpack

from zmqtrain.config.cluster import Role
from zmqtrain.coordination.membership import Peer, PeerTable
from zmqtrain.server.state import Pending, PendingPull, PendingPush, ShardState
from zmqtrain.store import segment_layout
from zmqtrain.store.changes import UPDATE, Change
from zmqtrain.store.marks import Mark, Result
from zmqtrain.wire.messages import Release

REASON_LENGTH = 100  # of an answer, as it is kept

log = logging.getLogger(__name__)


def packed_release(release: Release) -> bytes:
    """Return the bytes to keep of an answer."""
    packed: bytes = msgpack.packb(
        (
            release.sequence,
            release.result,
            release.version,
            release.batches,
            release.stop,
            release.reason[:REASON_LENGTH],
        )
    )
    return packed


def packed_peer(peer: Peer) -> bytes:
    """Return the bytes to keep of a worker's identity."""
    packed: bytes = msgpack.packb((peer.nonce, peer.process, peer.metrics, peer.process_identity))
    return packed


def recover(state: ShardState, peers: PeerTable) -> None:
    """Restore the state of a killed ps from the segment that it left.

    The shard's last change is finished; workers are members again, with their requests pending.
    Workers notice nothing but a pause.
    """
    began = time.monotonic()
    shard = state.shard
    change = shard.repair()
    state.generation = shard.segment.words[segment_layout.GENERATION]
    peers.outlive(shard.segment.words[segment_layout.INCARNATION])
    for mark in tuple(state.marks.read()):
        if mark.staged >= 0:
            shard.stage(mark.worker, mark.staged, mark.received)
        if mark.incarnation:
            _restore_worker(state, peers, mark, _result_of(mark, change))
    log.warning(
        "this ps was killed at version %d of generation %d: everything is there, %d workers, "
        "%d pushes to answer; repaired in %.0f ms",
        state.version,
        state.generation,
        sum(1 for peer in peers if peer.is_worker),
        len(state.pending),
        1e3 * (time.monotonic() - began),
    )


def _result_of(mark: Mark, change: Change | None) -> Result:
    """Return the result of a worker's last push; the last change may not be marked yet."""
    if mark.result or change is None:
        return mark.result
    pushes = [(part.worker, part.sequence) for part in change.contributions]
    if mark.received > 0 and (mark.worker, mark.received) in pushes:
        return "applied" if change.kind == UPDATE else "accumulated"
    return ""


def _restore_worker(state: ShardState, peers: PeerTable, mark: Mark, result: Result) -> None:
    name = (Role.WORKER.value, mark.worker)
    answer = msgpack.unpackb(mark.answer) if mark.answer else None
    if not mark.who or (mark.answered >= 0 and answer is None):
        return  # too much to be kept: it joins again
    nonce, process, metrics, place = msgpack.unpackb(mark.who)
    peer = Peer(name, mark.incarnation, nonce, process, metrics, place, None, time.monotonic())
    peer.received, peer.answered = mark.received, mark.answered
    peer.released = mark.released
    peer.lane, peer.buffer, peer.loss = mark.lane, mark.buffer, mark.loss
    if answer is not None:
        sequence, text, version, batches, stop, reason = answer
        peer.last_release = Release(sequence, text, version, tuple(batches), stop, reason)
    peers.restore(peer)
    if mark.received > mark.answered:
        state.pending[mark.worker] = _pending_of(mark, result)


def _pending_of(mark: Mark, result: Result) -> Pending:
    if mark.received == 0:
        return PendingPull(mark.incarnation, None)
    return PendingPush(
        mark.incarnation,
        None,
        mark.received,
        mark.version,
        mark.batch,
        mark.examples,
        mark.loss,
        mark.finite,
        result or ("" if mark.finite else "refused"),
        "" if mark.finite and result != "dropped" else "the ps that knew why was killed",
    )
