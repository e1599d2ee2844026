"""Receives what workers send to a ps: checks it, detects duplicates, stages it for orders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from zmqtrain.actors.actor import Request
from zmqtrain.coordination.delivery import Numbered
from zmqtrain.coordination.membership import Peer, PeerTable
from zmqtrain.errors import FencedError, ProtocolError, RefusedError
from zmqtrain.observe.metrics import Metrics
from zmqtrain.server.buffers import GradientBuffers
from zmqtrain.server.decider import Decider
from zmqtrain.server.executor import Executor
from zmqtrain.server.state import Pending, PendingPull, PendingPush, ShardState
from zmqtrain.store.segment_layout import COUNT_LIMIT
from zmqtrain.wire import chunks
from zmqtrain.wire.compression import Decompressor, make_compression
from zmqtrain.wire.messages import Chunk, Pull, Push, Release, Taken

log = logging.getLogger(__name__)

WINDOW_NBYTES = 8 << 20
"""Bytes of chunks that a worker may send to a ps without acknowledgement."""

MESSAGES_NBYTES = 2 * WINDOW_NBYTES
"""Memory of these chunks at a ps: the allocator keeps as much again as was freed last."""


class Receiver:
    """Takes in pulls and pushes."""

    def __init__(
        self,
        state: ShardState,
        peers: PeerTable,
        buffers: GradientBuffers,
        decider: Decider,
        executor: Executor,
        metrics: Metrics,
        *,
        compression: str,
        holds_lease: Callable[[int, int], bool] | None,
    ) -> None:
        """``holds_lease``: says whether a worker holds a lease on a batch, where that is known."""
        self._state = state
        self._peers = peers
        self._buffers = buffers
        self._decider = decider
        self._executor = executor
        self._metrics = metrics
        self._holds_lease = holds_lease
        made, trained = make_compression(compression), state.shard.layout.trained
        self._decode = chunks.take_in_at if made is None else Decompressor(made, trained).decode

    def on_pull(self, request: Request, pull: Pull) -> None:
        peer = self._peers.member(request)
        if self._is_repeated(peer, request, 0):
            return
        self._buffers.assign(peer)
        self._state.marks.receive(peer.index, 0)
        peer.received = 0
        peer.lanes = pull.lanes
        self._metrics.pulls.inc()
        self._executor.carry_out(self._orders(peer, PendingPull(peer.incarnation, request)))

    def on_push(self, request: Request, push: Push) -> None:
        peer = self._member(request)
        if self._is_repeated(peer, request, push.sequence):
            return
        self._check_push(request, push, peer)
        if not self._take_in(request, push, peer):
            return
        self._state.shard.stage(peer.index, peer.buffer, push.sequence)
        known = (push.version, push.batch, push.examples, push.loss, push.finite)
        self._state.marks.receive(peer.index, push.sequence, peer.buffer, known)
        peer.received = push.sequence
        peer.loss = push.loss
        if not push.finite:
            self._metrics.nonfinite_gradients.inc()
            self._metrics.pushes.refused.inc()
        self._executor.carry_out(self._orders(peer, PendingPush.of(request, push)))

    def on_chunk(self, request: Request, chunk: Chunk) -> None:
        """Decode a chunk of a gradient into the worker's buffer."""
        peer = self._peers.member(request)
        tensors = request.envelope.tensors
        if chunk.sequence > peer.received:  # else of a push that was sent twice
            self._check_turn(request, chunk.sequence, peer)
            if peer.lane != "tcp" or peer.buffer < 0:
                raise ProtocolError(f"a chunk of push {chunk.sequence} on lane {peer.lane}")
            gradient = self._state.shard.segment.gradient(peer.buffer)
            start = chunk.index * chunks.CHUNK_SIZE
            self._decode(start, tensors, chunks.at(gradient, chunk.index))
            peer.chunks.add(chunk.index)
        peer.unacknowledged_nbytes += sum(tensor.nbytes for tensor in tensors)
        if 2 * peer.unacknowledged_nbytes >= WINDOW_NBYTES:
            request.reply(Taken(peer.unacknowledged_nbytes))
            peer.unacknowledged_nbytes = 0

    def _member(self, request: Request) -> Peer:
        try:
            return self._peers.member(request)
        except FencedError:
            self._metrics.pushes.fenced.inc()
            raise

    def _orders(self, peer: Peer, pending: Pending) -> Sequence[Numbered]:
        """Enter a request; return the orders that follow from it."""
        self._state.pending[peer.index] = pending
        return self._decider.arrived(peer.index, pending) if self._state.initialised else ()

    def _is_repeated(self, peer: Peer, request: Request, sequence: int) -> bool:
        """Answer a repeated request as before, without another effect; False if it is new."""
        if sequence > peer.received:
            return False
        self._state.duplicates += 1
        self._metrics.pushes.duplicate.inc()
        pending = self._state.pending.get(peer.index)
        if pending is not None and pending.sequence == sequence:
            pending.request = request
        elif peer.last_release is not None and peer.last_release.sequence == sequence:
            self._executor.after_orders(
                partial(self._release_again, request, peer, peer.last_release)
            )
        else:
            raise RefusedError(f"push {sequence} of {peer} was answered long ago")
        return True

    def _release_again(self, request: Request, peer: Peer, release: Release) -> None:
        again = replace(release, version=self._state.version)
        self._executor.send_release(request, peer, again)

    def _check_turn(self, request: Request, sequence: int, peer: Peer) -> None:
        state = self._state
        if request.envelope.generation != state.generation:
            raise RefusedError(
                f"push of generation {request.envelope.generation}, "
                f"the job is in generation {state.generation}"
            )
        if not state.initialised:
            raise RefusedError(f"{state.task} holds no parameters yet, so a push has no base")
        if sequence != peer.received + 1:
            raise ProtocolError(f"push {sequence} of {peer} follows push {peer.received}")
        if peer.index in state.pending:
            raise ProtocolError(
                f"push {sequence} of {peer} came before {peer.received} was answered"
            )

    def _check_push(self, request: Request, push: Push, peer: Peer) -> None:
        self._check_turn(request, push.sequence, peer)
        if peer.buffer < 0:
            raise ProtocolError(f"push {push.sequence} of {peer} came without a pull before it")
        if not 1 <= push.examples < COUNT_LIMIT:
            raise ProtocolError(f"a push of {push.examples} examples, expected at least 1")
        if not 0 <= push.version < COUNT_LIMIT or not 0 <= push.batch < COUNT_LIMIT:
            raise ProtocolError(f"a push of batch {push.batch} on version {push.version}")
        if self._holds_lease is not None and not self._holds_lease(peer.index, push.batch):
            raise ProtocolError(f"{peer} pushes batch {push.batch}, which it has no lease on")

    def _take_in(self, request: Request, push: Push, peer: Peer) -> bool:
        """Complete the gradient in the worker's buffer in the segment.

        False: some of its chunks were lost. So the push counts as lost as well; the answer to the
        worker's next heartbeat makes it send both again.
        """
        gradient = self._state.shard.segment.gradient(peer.buffer)
        tensors, came = request.envelope.tensors, len(peer.chunks)
        travels = push.finite and peer.lane == "tcp"
        in_chunks = (
            chunks.count(len(gradient)) if travels and chunks.count(len(gradient)) > 1 else 0
        )
        rides = travels and not in_chunks
        if came < in_chunks and not tensors:
            log.info(
                "of push %d of %s only %d of %d chunks came", push.sequence, peer, came, in_chunks
            )
            return False
        if bool(tensors) != rides or (push.finite and came != in_chunks):
            raise ProtocolError(
                f"a push of {len(tensors)} tensors after {came} chunks, expected "
                f"{'some' if rides else 'none'} after {in_chunks}"
            )
        peer.chunks.clear()
        if rides:
            self._decode(0, tensors, gradient)
        return True
