"""Restores workers, requests and answers from the segment of the previous process of a ps."""

from __future__ import annotations

import logging
import time

from zmqtrain.config.cluster import Role
from zmqtrain.coordination.peers import Peer, PeerTable
from zmqtrain.coordination.state import unpack
from zmqtrain.models.weights import weight_of
from zmqtrain.server.state import Result, ShardState, WorkerRecord
from zmqtrain.store import segment_layout
from zmqtrain.store.changes import ACCUMULATE, Change, Contribution

log = logging.getLogger(__name__)


def recover(state: ShardState, peers: PeerTable) -> None:
    """Restore the state of a killed ps from the segment that it left.

    It finishes the shard's last change, and restores the workers with their pending requests.
    """
    began = time.monotonic()
    shard = state.shard
    change = shard.repair()
    state.generation = shard.segment.words[segment_layout.GENERATION]
    peers.outlive(shard.segment.words[segment_layout.INCARNATION])
    for index, mark in state.marks.read():
        staged, *known = unpack(mark)  # as ShardState.keep writes it
        if staged:
            buffer, _, sequence, weight = staged
            shard.stage(index, buffer, sequence, weight)
        if known:
            worker = state.workers[index] = WorkerRecord.unpacked(index, known)
            if result := _result_by(change, worker):
                state.decided(index, result)
            peer = Peer(
                (Role.WORKER, index),
                worker.incarnation,
                *worker.identity,
                contact=None,
                heard_at=time.monotonic(),
            )
            peer.pushes, peer.lanes = worker.received, worker.lane
            peers.restore(peer)
    log.warning(
        "this ps was killed at version %d of generation %d: everything is there; workers: "
        "%d, pushes to answer: %d; repaired in %.0f ms",
        state.version,
        state.generation,
        len(state.workers),
        len(state.pending()),
        1e3 * (time.monotonic() - began),
    )


def _result_by(change: Change | None, worker: WorkerRecord) -> Result | None:
    """Return the last change's result for a pending push whose mark has none."""
    push, pending = worker.pushed, worker.pending
    if change is None or push is None or pending is None or pending.result is not None:
        return None
    staged = Contribution(worker.buffer, worker.index, push.sequence, weight_of(push))
    if staged not in change.contributions:
        return None
    return "accumulated" if change.kind == ACCUMULATE else "applied"
