"""The gradient buffers of workers in a ps's segment."""

from __future__ import annotations

from zmqtrain.actors.actor import Request
from zmqtrain.coordination.peers import Peer, PeerTable
from zmqtrain.errors import RefusedError
from zmqtrain.server.state import ShardState, WorkerRecord
from zmqtrain.wire.messages import Mapped, MapSegment

SPARE = 16  # buffers beyond those of the workers expected, for more workers and later lives


def has_dropped_its_lock(state: ShardState, peer: Peer) -> bool:
    """Return whether a worker's process has ended, according to its lock in the kernel.

    A worker that has pulled on lane shm holds the lock of its buffer for as long as it lives.
    """
    worker = state.workers.get(peer.index) if peer.is_worker else None
    if worker is None or worker.lane != "shm" or not worker.has_pulled:
        return False
    return not state.shard.segment.is_held(worker.buffer)


class GradientBuffers:
    """Hands out the gradient buffers of one segment.

    Two lives never share a buffer: a worker that counts as dead may still write to its own. Another
    worker gets it once its lock is free and no update needs it. A process with a new life gives up
    its first buffer when it has the second one.
    """

    def __init__(self, state: ShardState, peers: PeerTable, workers: int) -> None:
        """``workers``: the expected number."""
        self._state = state
        self._peers = peers
        self._limit = 2 * workers + SPARE

    def assign(self, worker: WorkerRecord) -> None:
        """Give a worker a buffer, unless it has one.

        Raises:
            RefusedError: there are too many workers.
            SegmentError: there is no memory for one more.
        """
        if worker.buffer < 0:
            index = self._free_index()
            self._state.shard.segment.gradient(index)
            worker.buffer = index

    def on_map_segment(self, request: Request, message: MapSegment) -> None:
        peer = self._peers.member(request)
        if not message.nonce:  # it has asked whether it is a member
            request.reply(Mapped(-1))
            return
        if message.nonce != self._state.shard.segment.nonce:
            raise RefusedError(
                f"{request.sender} has not reached the segment of {self._state.task}"
            )
        peer.lanes = message.lane
        if not peer.is_worker:
            request.reply(Mapped(-1))
            return
        worker = self._state.workers[peer.index]
        worker.lane = message.lane
        self.assign(worker)
        self._state.keep(worker)
        request.reply(Mapped(worker.buffer))

    def _free_index(self) -> int:
        shard = self._state.shard
        live = {worker.buffer for worker in self._state.workers.values()}
        for index in range(self._limit):
            if index in live or shard.is_staged(index) or shard.segment.is_held(index):
                continue
            return index
        raise RefusedError(
            f"{self._state.task} keeps gradients of at most {self._limit} workers: start it with a "
            "larger --max-workers"
        )
