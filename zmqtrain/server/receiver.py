"""What workers send to a ps: checked, recognised if it was seen before, laid ready for orders."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zmqtrain.actors.actor import Request
from zmqtrain.coordination.membership import Peer
from zmqtrain.errors import FencedError, ProtocolError, RefusedError
from zmqtrain.server.direction import Pending
from zmqtrain.store.segment_layout import COUNT_LIMIT
from zmqtrain.wire import chunks as chunks
from zmqtrain.wire.compression import make_compression
from zmqtrain.wire.messages import Chunk, Pull, Push, Release, Taken

if TYPE_CHECKING:
    from zmqtrain.server.server import ParameterServer

log = logging.getLogger(__name__)

WINDOW_NBYTES = 8 << 20
"""Bytes of chunks that a worker may have under way to a ps, beyond those confirmed."""

MESSAGES_NBYTES = 2 * WINDOW_NBYTES
"""Memory that they may take at a ps: the allocator keeps as much again as was freed of late."""


class Receiver:
    """Pulls and pushes on their way into a ps."""

    def __init__(self, ps: ParameterServer) -> None:
        self._ps = ps
        self.duplicates = 0  # pushes that had been seen before
        compression = make_compression(ps.job.compression)
        self._decode = chunks.take_in if compression is None else compression.decode
        ps.on(Pull, self._on_pull)
        ps.on(Chunk, self._on_chunk)
        ps.on(Push, self._on_push)

    def _on_pull(self, request: Request, pull: Pull) -> None:
        peer = self._ps.peers.member(request)
        if self._is_repeated(peer, request, 0):
            return
        self._ps.gradients.assign(peer)
        self._ps.marks.receive(request.sender.index, 0)
        peer.received = 0
        peer.lanes = pull.lanes
        self._await_release(request.sender.index, Pending(request.sender.incarnation, request, 0))
        self._ps.metrics.pulls.inc()

    def _on_push(self, request: Request, push: Push) -> None:
        try:
            peer = self._ps.peers.member(request)
        except FencedError:
            self._ps.metrics.pushes.fenced.inc()
            raise
        if self._is_repeated(peer, request, push.sequence):
            return
        worker = request.sender.index
        self._check_push(request, push, peer)
        if not self._take_in(request, push, peer):
            return
        self._ps.shard.stage(worker, peer.gradient, push.sequence)
        known = (push.version, push.batch, push.examples, push.loss, push.finite)
        self._ps.marks.receive(worker, push.sequence, peer.gradient, known)
        peer.received = push.sequence
        peer.loss = push.loss
        self._await_release(
            worker,
            Pending(
                request.sender.incarnation,
                request,
                push.sequence,
                push.version,
                push.batch,
                push.examples,
                push.loss,
                push.finite,
                "" if push.finite else "refused",
                "" if push.finite else "the loss or the gradient is NaN or infinite",
            ),
        )

    def _is_repeated(self, peer: Peer, request: Request, sequence: int) -> bool:
        """Answer a push that was seen before: the same answer, and nothing changes."""
        if sequence > peer.received:
            return False
        self.duplicates += 1
        self._ps.metrics.pushes.duplicate.inc()
        pending = self._ps.pending.get(request.sender.index)
        if pending is not None and pending.sequence == sequence:
            pending.request = request
        elif peer.last_release is not None and peer.last_release.sequence == sequence:
            self._ps.executor.after_orders(
                partial(self._release_again, request, peer, peer.last_release)
            )
        else:
            raise RefusedError(f"push {sequence} of {peer} was answered long ago")
        return True

    def _release_again(self, request: Request, peer: Peer, release: Release) -> None:
        again = replace(release, version=self._ps.shard.version)
        self._ps.executor.send_release(request, peer, again)

    def _on_chunk(self, request: Request, chunk: Chunk) -> None:
        """Lay a chunk of a gradient where the whole of it will be."""
        peer = self._ps.peers.member(request)
        tensors = request.envelope.tensors
        if chunk.sequence > peer.received:  # else of a push that was sent twice
            self._check_turn(request, chunk.sequence, peer)
            if peer.lane != "tcp" or peer.gradient < 0:
                raise ProtocolError(f"a chunk of push {chunk.sequence} on lane {peer.lane}")
            gradient = self._ps.shard.segment.gradient(peer.gradient)
            self._decode(tensors, chunks.at(gradient, chunk.index))
            peer.chunks.add(chunk.index)
        peer.untaken_nbytes += sum(tensor.nbytes for tensor in tensors)
        if 2 * peer.untaken_nbytes >= WINDOW_NBYTES:
            request.reply(Taken(peer.untaken_nbytes))
            peer.untaken_nbytes = 0

    def _check_turn(self, request: Request, sequence: int, peer: Peer) -> None:
        if request.envelope.generation != self._ps.generation:
            raise RefusedError(
                f"push of generation {request.envelope.generation}, "
                f"the job is in generation {self._ps.generation}"
            )
        if not self._ps.initialised:
            raise RefusedError(f"{self._ps.task} holds no parameters yet, so a push has no base")
        if sequence != peer.received + 1:
            raise ProtocolError(f"push {sequence} of {peer} follows push {peer.received}")
        if request.sender.index in self._ps.pending:
            raise ProtocolError(
                f"push {sequence} of {peer} came before {peer.received} was answered"
            )

    def _check_push(self, request: Request, push: Push, peer: Peer) -> None:
        self._check_turn(request, push.sequence, peer)
        if peer.gradient < 0:
            raise ProtocolError(f"push {push.sequence} of {peer} came without a pull before it")
        if not 1 <= push.examples < COUNT_LIMIT:
            raise ProtocolError(f"a push of {push.examples} examples, expected at least 1")
        if not 0 <= push.version < COUNT_LIMIT or not 0 <= push.batch < COUNT_LIMIT:
            raise ProtocolError(f"a push of batch {push.batch} on version {push.version}")
        self._ps.direction.check(request.sender.index, push)

    def _take_in(self, request: Request, push: Push, peer: Peer) -> bool:
        """See to it that all of the gradient lies in the worker's place in the segment.

        False: some of its chunks were lost. So the push counts as lost as well; the answer to the
        worker's next heartbeat tells it to send both again.
        """
        gradient = self._ps.shard.segment.gradient(peer.gradient)
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
            self._decode(tensors, gradient)
        return True

    def _await_release(self, worker: int, pending: Pending) -> None:
        if not pending.finite:
            self._ps.metrics.nonfinite_gradients.inc()
            self._ps.metrics.pushes.refused.inc()
        self._ps.pending[worker] = pending
        if self._ps.initialised:
            self._ps.direction.arrived(worker, pending)
