"""What workers send to a ps: checked, recognised if it was seen before, laid ready for orders."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zmqtrain.actors.actor import Request
from zmqtrain.errors import ProtocolError, RefusedError
from zmqtrain.roles.direction import Pending
from zmqtrain.roles.peers import Peer
from zmqtrain.store.shard import all_finite
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.messages import Pull, Push, Release

if TYPE_CHECKING:
    from zmqtrain.roles.ps import ParameterServer


class Intake:
    """Pulls and pushes on their way into a ps."""

    def __init__(self, ps: ParameterServer) -> None:
        self._ps = ps
        self.duplicates = 0  # pushes that had been seen before
        ps.handlers |= {Pull: self._on_pull, Push: self._on_push}

    def _on_pull(self, request: Request) -> None:
        peer = self._ps.peers.member(request)
        if self._is_repeated(peer, request, 0):
            return
        peer.received = 0
        self._await_release(request.sender.index, Pending(request, 0))
        self._ps.metrics.pulls.inc()

    def _on_push(self, request: Request) -> None:
        peer = self._ps.peers.member(request)
        push = request.envelope.message
        if not isinstance(push, Push) or self._is_repeated(peer, request, push.sequence):
            return
        worker = request.sender.index
        self._check_push(request, push, peer)
        finite = push.finite and self._stage(request, worker)
        peer.received = push.sequence
        peer.loss = push.loss
        self._await_release(
            worker,
            Pending(
                request,
                push.sequence,
                push.version,
                push.batch,
                push.examples,
                push.loss,
                finite,
                "" if finite else "refused",
                "" if finite else "the loss or the gradient is NaN or infinite",
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
            self._ps.execution.after_orders(
                partial(self._release_again, request, peer.last_release)
            )
        else:
            raise RefusedError(f"push {sequence} of {peer} was answered long ago")
        return True

    def _release_again(self, request: Request, release: Release) -> None:
        again = replace(release, version=self._ps.shard.version)
        request.reply(again, (Tensor.of(self._ps.shard.parameters),))

    def _check_push(self, request: Request, push: Push, peer: Peer) -> None:
        if request.envelope.epoch != self._ps.epoch:
            raise RefusedError(
                f"push of epoch {request.envelope.epoch}, the job is in epoch {self._ps.epoch}"
            )
        if not self._ps.initialised:
            raise RefusedError(f"{self._ps.task} holds no parameters yet, so a push has no base")
        if push.sequence != peer.received + 1:
            raise ProtocolError(f"push {push.sequence} of {peer} follows push {peer.received}")
        if request.sender.index in self._ps.pending:
            raise ProtocolError(
                f"push {push.sequence} of {peer} came before {peer.received} was answered"
            )
        if len(request.envelope.tensors) != (1 if push.finite else 0):
            raise ProtocolError(
                f"a push of {len(request.envelope.tensors)} tensors, expected one, or none with "
                "finite False"
            )
        if push.examples < 1:
            raise ProtocolError(f"a push of {push.examples} examples, expected at least 1")
        self._ps.direction.check(request.sender.index, push)

    def _stage(self, request: Request, worker: int) -> bool:
        """Copy the gradient into the worker's slot; say whether it is finite."""
        slot = self._ps.shard.gradient_slot(worker)
        request.envelope.tensors[0].copy_to(slot)
        return all_finite(slot)

    def _await_release(self, worker: int, pending: Pending) -> None:
        if not pending.finite:
            self._ps.metrics.nonfinite_gradients.inc()
            self._ps.metrics.pushes.refused.inc()
        self._ps.pending[worker] = pending
        if self._ps.initialised:
            self._ps.direction.arrived(worker, pending)
