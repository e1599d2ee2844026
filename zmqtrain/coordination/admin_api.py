"""The admin API: requests of the chief and of people to the leader.

Some requests wait here until the status changes, the policy's barrier is reached, or every shard
has written its part of a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from zmqtrain.actors.actor import Request, ResendId, guarded
from zmqtrain.actors.task import JobActor
from zmqtrain.callbacks.base import called_by_steps
from zmqtrain.config.cluster import Role
from zmqtrain.coordination.leader import Leader
from zmqtrain.coordination.peers import Peer
from zmqtrain.coordination.status import HostStatus, status_of
from zmqtrain.errors import CheckpointError, ConfigError, RefusedError, ZmqTrainError
from zmqtrain.planning.obstacles import obstacle_to_switch
from zmqtrain.policies import try_policy
from zmqtrain.protocol.checkpoint import Saved, ShardFile
from zmqtrain.protocol.status import Status, Wait
from zmqtrain.wire import control, messages
from zmqtrain.wire.buffers import Tensor

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Saving:
    """A checkpoint that the shards are writing, and the answer to its request, without files."""

    request: Request
    saved: Saved
    files: dict[int, ShardFile] = field(default_factory=dict)
    began_at: float = field(default_factory=lambda: time.monotonic())


class AdminApi:
    """Handles the requests of the chief and of people, on ps 0."""

    def __init__(
        self, host: JobActor, leader: Leader, host_status: Callable[[], HostStatus]
    ) -> None:
        """``host``: ps 0, which hosts the leader."""
        self._host, self._leader, self._host_status = host, leader, host_status
        self._event = 0  # rises when the chief has to act
        self._is_pass_over = False  # at the last review
        job = leader.job  # the chief has to act at multiples of these steps
        every = job.evaluate_every, job.save_steps, *(n for _, n in called_by_steps(job.callbacks))
        self._intervals = [steps for steps in every if steps]
        self._multiples = [0 for _ in self._intervals]  # passed at the last review
        self._save_failure = ""  # why the last checkpoint failed
        # Requests that wait; one that is sent again is answered once, at its new connection.
        self._save_requests: dict[ResendId, Request] = {}
        self._in_snapshot: set[ResendId] = set()  # requests before the last snapshot order
        self._stop_requests: dict[ResendId, Request] = {}
        self._switch_requests: dict[ResendId, Request] = {}
        self._close_requests: dict[ResendId, Request] = {}
        self._watchers: dict[ResendId, Request] = {}
        self._saving: dict[str, Saving] = {}
        self._saved: dict[str, Saved] = {}  # the last one, by its directory

    @property
    def handlers(self) -> dict[type, Callable[[Request, Any], None]]:
        return {
            control.GetStatus: self.on_get_status,
            control.SwitchPolicy: self.on_switch_policy,
            control.RequestSave: self.on_request_save,
            control.RequestStop: self.on_request_stop,
            control.Save: self.on_save,
            control.SaveEnded: self.on_save_ended,
            control.ShardWritten: self.on_shard_file,
            control.Close: self.on_close,
            control.Evaluate: self.on_evaluate,
            control.Evaluated: self.on_evaluated,
            control.Extend: self.on_directive,
            control.SetRate: self.on_directive,
        }

    def status(self) -> Status:
        host = self._host_status()
        host.waits += tuple(self._waits_for_parts(host.task.task))
        return status_of(
            self._leader,
            host,
            event=self._event,
            save_wanted=bool(self._save_requests),
            stop_wanted=bool(self._stop_requests),
            save_failure=self._save_failure,
        )

    def _waits_for_parts(self, owner: str) -> Iterator[Wait]:
        """Yield the chief's wait for the missing parts of each checkpoint."""
        others = range(1, self._leader.plan.shards)
        for saving in self._saving.values():
            since_s = time.monotonic() - saving.began_at
            if missing := ", ".join(f"ps {each}" for each in others if each not in saving.files):
                yield Wait(owner, missing, "a part of a checkpoint is not written", since_s)

    def review(self) -> None:
        """Answer the requests that waited for the last event."""
        coordinator = self._leader.coordinator
        if coordinator.finished:
            _answer_all(self._close_requests, messages.Done())
        was_over = self._is_pass_over
        self._is_pass_over = coordinator.is_pass_over
        before, step = self._multiples, self._leader.step
        self._multiples = [step // every for every in self._intervals]
        is_due = self._multiples != before or (self._is_pass_over and not was_over)
        if coordinator.finished or self._leader.failure or is_due:
            self._notify()
        if self._switch_requests and coordinator.next_policy is None:
            _answer_all(self._switch_requests, messages.Done(coordinator.policy.spec))

    def note_file(self, message: control.ShardWritten) -> None:
        """Note that a shard's part of a checkpoint is durable, or was not written."""
        directory = message.directory
        saving = self._saving.get(directory)
        if saving is None:
            return
        if message.file is None:
            self._saving.pop(directory).request.refuse(CheckpointError(message.reason))
            return
        saving.files[message.file.shard] = message.file
        if len(saving.files) == self._leader.plan.shards:
            del self._saving[directory]
            files = tuple(saving.files[shard] for shard in sorted(saving.files))
            saved = replace(saving.saved, files=files)
            self._saved = {directory: saved}
            saving.request.reply(saved)

    def ended(self, reason: str) -> None:
        _answer_all(self._stop_requests, messages.Done(reason))

    def give_up_saves(self, error: ZmqTrainError) -> None:
        """Refuse the saves under way: a shard has lost its part."""
        for directory in tuple(self._saving):
            self._saving.pop(directory).request.refuse(error)

    def ps_left(self, peer: Peer) -> None:
        """Refuse all saves: a ps has left with a checkpoint, or has lost its key."""
        for request in self._save_requests.values():
            _refuse_save(request, peer)
        self._save_requests.clear()
        self.give_up_saves(CheckpointError(_without(peer)))

    def _ps_that_left(self) -> Peer | None:
        peers = self._leader.peers
        return next((peer for peer in peers if peer.role == Role.PS and peer.left), None)

    def forget_saves(self) -> None:
        """Give up the checkpoint of the previous generation."""
        self._saving.clear()

    def on_get_status(self, request: Request, message: control.GetStatus) -> None:
        if message.wait_s > 0 and message.seen >= self._event:
            asking = request.resend_id
            if asking not in self._watchers:
                answer = guarded(self._answer, self._host.crash)
                asyncio.get_running_loop().call_later(message.wait_s, answer, asking)
            self._watchers[asking] = request
            return
        request.reply(self.status())

    def on_switch_policy(self, request: Request, message: control.SwitchPolicy) -> None:
        self._check_begun("there is no policy to change")
        if self._leader.coordinator.finished:
            raise RefusedError("the job needs no more gradients: there is no policy to change")
        try:
            policy = try_policy(message.spec)
        except ConfigError as error:
            raise RefusedError(str(error)) from None
        plan = self._leader.plan
        if obstacle := obstacle_to_switch(plan.job, plan.copies, policy):
            raise RefusedError(obstacle)
        self._leader.at_rest(partial(self._switch, request, policy.spec))

    def _switch(self, request: Request, spec: str) -> None:
        asking, coordinator = request.resend_id, self._leader.coordinator
        is_repeated = asking in self._switch_requests
        if not is_repeated and coordinator.next_policy is None and coordinator.policy.spec == spec:
            request.reply(messages.Done(spec))  # it may have crossed the answer
            return
        self._switch_requests[asking] = request
        if not is_repeated:
            log.info("changing the policy to %s at the next barrier", spec)
            self._leader.event(control.SwitchPolicy(spec))

    def on_request_save(self, request: Request, _: control.RequestSave) -> None:
        if not self._leader.job.logdir:
            raise RefusedError("the job has no logdir to save in: start it with --logdir DIR")
        if (left := self._ps_that_left()) is not None:
            _refuse_save(request, left)
            return
        self._save_requests[request.resend_id] = request
        self._notify()

    def on_request_stop(self, request: Request, _: control.RequestStop) -> None:
        self._stop_requests[request.resend_id] = request
        self._notify()

    def on_save(self, request: Request, message: control.Save) -> None:
        self._leader.peers.member(request)
        self._check_begun("there is nothing to save")
        if message.directory not in self._saved and (left := self._ps_that_left()) is not None:
            raise CheckpointError(_without(left))
        self._leader.at_rest(partial(self._save, request, message))

    def _save(self, request: Request, message: control.Save) -> None:
        if message.directory in self._saving:
            self._saving[message.directory].request = request
            return
        if message.directory in self._saved:  # a second write would damage it
            request.reply(self._saved[message.directory])
            return
        # The ledger of this moment belongs to the shards' memory at the snapshot order.
        self._saving[message.directory] = Saving(request, self._leader.saved())
        self._in_snapshot = set(self._save_requests)
        self._leader.event(message)

    def on_save_ended(self, request: Request, message: control.SaveEnded) -> None:
        self._leader.peers.member(request)
        self._save_failure = message.error
        if message.error and message.path:
            return  # it is saved, and was not uploaded
        for asking, waiting in tuple(self._save_requests.items()):
            if message.error:
                waiting.refuse(CheckpointError(message.error))
            # A leaving ps knows by itself whether it carried out orders after the snapshot.
            elif asking in self._in_snapshot or waiting.sender.role == Role.PS:
                waiting.reply(messages.Done(message.path))
            else:
                continue
            del self._save_requests[asking]

    def on_close(self, request: Request, close: control.Close) -> None:
        self._leader.peers.member(request)
        self._check_begun("there is nothing to end")
        if self._leader.coordinator.finished:
            request.reply(messages.Done())
            return
        is_repeated = request.resend_id in self._close_requests
        self._close_requests[request.resend_id] = request
        if not is_repeated:
            self._leader.event(close)

    def on_directive(self, request: Request, directive: control.Extend | control.SetRate) -> None:
        self._leader.peers.member(request)
        self._check_begun("there is nothing to go on with")
        self._leader.at_rest(partial(self._direct, request, directive))

    def _direct(self, request: Request, directive: control.Extend | control.SetRate) -> None:
        if isinstance(directive, control.Extend):
            self._leader.epoch_batches = directive.epoch_batches
        self._leader.event(directive)
        request.reply(messages.Done())

    def on_evaluate(self, request: Request, message: control.Evaluate) -> None:
        """Forward it to the worker; the chief does not wait for an answer."""
        self._leader.peers.member(request)
        self._pass_on(Role.WORKER, message.worker, message)

    def on_evaluated(self, request: Request, message: control.Evaluated) -> None:
        """Forward it to the chief."""
        self._leader.peers.member(request)
        self._pass_on(Role.CHIEF, 0, message, request.envelope.tensors)

    def _pass_on(
        self, role: Role, index: int, message: messages.Message, tensors: tuple[Tensor, ...] = ()
    ) -> None:
        peer = self._leader.peers.get(role, index)
        if peer is not None and not peer.gone and peer.contact is not None:
            peer.contact.send(message, tensors)

    def on_shard_file(self, request: Request, message: control.ShardWritten) -> None:
        self._leader.peers.member(request)
        self.note_file(message)
        request.reply(messages.Done())

    def _check_begun(self, lacking: str) -> None:
        """Raise RefusedError with the text ``lacking`` before the first generation."""
        if not self._leader.has_begun:
            raise RefusedError(f"{lacking}: the job is not initialised")

    def _notify(self) -> None:
        """Answer the status requests that wait for a change."""
        self._event += 1
        watchers, self._watchers = self._watchers, {}
        for request in watchers.values():
            request.reply(self.status())

    def _answer(self, asking: ResendId) -> None:
        if (watcher := self._watchers.pop(asking, None)) is not None:
            watcher.reply(self.status())


def _without(peer: Peer) -> str:
    if peer.left:
        return f"{peer} has left with the last checkpoint; another one needs every ps"
    return f"{peer} {peer.absence}; a checkpoint needs every ps"


def _refuse_save(request: Request, left: Peer) -> None:
    """Let a ps leave, too; refuse the checkpoints of others."""
    if request.sender.role == Role.PS:
        request.reply(messages.Leave(_without(left)))
    else:
        request.refuse(RefusedError(f"{_without(left)}; ask again when it is back"))


def _answer_all(requests: dict[ResendId, Request], message: messages.Message) -> None:
    for request in requests.values():
        request.reply(message)
    requests.clear()
