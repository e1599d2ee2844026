"""The leader's admin: what the chief and people ask of the job.

Some answers take time: they are kept here until the status changes, the policy's barrier is
reached, or every shard has written its part of a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zmqtrain.actors.actor import Request
from zmqtrain.actors.callbacks import guarded
from zmqtrain.coordination.events import CloseAsked, SnapshotAsked, SwitchAsked
from zmqtrain.coordination.status import status_of
from zmqtrain.errors import CheckpointError, ConfigError, RefusedError, ZmqTrainError
from zmqtrain.policies import Policy, make_policy
from zmqtrain.wire.messages import (
    Close,
    Done,
    GetStatus,
    RequestSave,
    RequestStop,
    Save,
    Saved,
    SaveEnded,
    ShardFailed,
    ShardFile,
    ShardWritten,
    SwitchPolicy,
    WorkerMark,
)

if TYPE_CHECKING:
    from zmqtrain.coordination.leader import Leader

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Saving:
    """A checkpoint that the shards are writing."""

    request: Request
    step: int
    next_batch: int
    open_batches: tuple[int, ...]
    examples: int
    marks: tuple[WorkerMark, ...]
    files: dict[int, ShardFile] = field(default_factory=dict)


class AdminApi:
    """Requests to the leader that are not pushes."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self.event = 0  # rises when the chief has to act
        self.save_requests: list[Request] = []
        self.stop_wanted = False
        self._switch_requests: list[Request] = []
        self._close_requests: list[Request] = []
        self._watchers: list[Request] = []
        self._saving: dict[str, Saving] = {}
        self._saved: dict[str, Saved] = {}  # the last one, by its directory
        leader.ps.on(GetStatus, self._on_get_status)
        leader.ps.on(SwitchPolicy, self._on_switch_policy)
        leader.ps.on(RequestSave, self._on_request_save)
        leader.ps.on(RequestStop, self._on_request_stop)
        leader.ps.on(Save, self._on_save)
        leader.ps.on(SaveEnded, self._on_save_ended)
        leader.ps.on(ShardWritten, self._on_shard_file)
        leader.ps.on(ShardFailed, self._on_shard_file)
        leader.ps.on(Close, self._on_close)

    def notify(self) -> None:
        """Tell those who watch that something has changed."""
        self.event += 1
        watchers, self._watchers = self._watchers, []
        for request in watchers:
            request.reply(status_of(self._leader))

    def policy_settled(self, policy: Policy) -> None:
        """No change of policy is under way any more."""
        for request in self._switch_requests:
            request.reply(Done(policy.spec))
        self._switch_requests.clear()

    def closed(self) -> None:
        """The job needs no more gradients, and none is being computed."""
        for request in self._close_requests:
            request.reply(Done())
        self._close_requests.clear()

    def written(self, directory: str, file: ShardFile) -> None:
        """A shard's part of a checkpoint is durable."""
        saving = self._saving.get(directory)
        if saving is None:
            return
        saving.files[file.shard] = file
        if len(saving.files) == self._leader.ps.shards:
            del self._saving[directory]
            saved = Saved(
                saving.step,
                self._leader.policy,
                tuple(saving.files[shard] for shard in sorted(saving.files)),
                saving.next_batch,
                saving.open_batches,
                saving.examples,
                saving.marks,
            )
            self._saved = {directory: saved}
            saving.request.reply(saved)

    def not_written(self, directory: str, error: ZmqTrainError) -> None:
        """Some shard cannot write its part of a checkpoint."""
        saving = self._saving.pop(directory, None)
        if saving is not None:
            saving.request.refuse(error)

    def give_up_saves(self, error: ZmqTrainError) -> None:
        """Some shard has forgotten what it was writing."""
        for directory in tuple(self._saving):
            self.not_written(directory, error)

    def forget_saves(self) -> None:
        """A new generation begins; what was being written belongs to the one before."""
        self._saving.clear()

    def _on_get_status(self, request: Request, message: GetStatus) -> None:
        if message.wait_s > 0 and message.seen >= self.event:
            self._watchers.append(request)
            answer = guarded(self._answer, self._leader.ps.crash)
            asyncio.get_running_loop().call_later(message.wait_s, answer, request)
            return
        request.reply(status_of(self._leader))

    def _answer(self, watcher: Request) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
            watcher.reply(status_of(self._leader))

    def _on_switch_policy(self, request: Request, message: SwitchPolicy) -> None:
        coordinator = self._leader.coordinator
        if coordinator is None:
            raise RefusedError("the job has not begun: its parameters are not initialised")
        if coordinator.finished:
            raise RefusedError("the job needs no more gradients: there is no policy to change")
        try:
            policy = make_policy(message.spec)
        except ConfigError as error:
            raise RefusedError(str(error)) from None
        log.info("changing the policy to %s at the next barrier", policy.spec)
        self._switch_requests.append(request)
        self._leader.event(SwitchAsked(policy.spec))

    def _on_request_save(self, request: Request, _: RequestSave) -> None:
        if not self._leader.ps.job.logdir:
            raise RefusedError("the job has no logdir to save in: start it with --logdir DIR")
        self.save_requests.append(request)
        self.notify()

    def _on_request_stop(self, request: Request, _: RequestStop) -> None:
        self.stop_wanted = True
        self.notify()
        self._leader.ps.spawn(self._answer_at_the_end(request))

    async def _answer_at_the_end(self, request: Request) -> None:
        ps = self._leader.ps
        await ps.stopping.wait()
        request.reply(Done(ps.shutdown.reason if ps.shutdown is not None else f"{ps.task} ends"))

    def _on_save(self, request: Request, message: Save) -> None:
        coordinator = self._leader.coordinator
        self._leader.ps.peers.member(request)
        if coordinator is None:
            raise RefusedError("there is nothing to save: the job is not initialised")
        if message.directory in self._saving:
            self._saving[message.directory].request = request
            return
        if message.directory in self._saved:  # to write it again would harm what is there
            request.reply(self._saved[message.directory])
            return
        # The ledger of this moment belongs to the shards' memory at the snapshot order.
        ledger = coordinator.ledger
        self._saving[message.directory] = Saving(
            request,
            coordinator.version,
            ledger.next_batch,
            ledger.open_batches(),
            ledger.examples,
            tuple(
                WorkerMark(worker, member.incarnation, member.sequence)
                for worker, member in coordinator.members.items()
            ),
        )
        self._leader.event(SnapshotAsked(message.directory))

    def _on_save_ended(self, request: Request, message: SaveEnded) -> None:
        self._leader.ps.peers.member(request)
        for waiting in self.save_requests:
            if message.error:
                waiting.refuse(CheckpointError(message.error))
            else:
                waiting.reply(Done(message.path))
        self.save_requests.clear()

    def _on_close(self, request: Request, close: Close) -> None:
        coordinator = self._leader.coordinator
        self._leader.ps.peers.member(request)
        if coordinator is None:
            raise RefusedError("there is nothing to end: the job is not initialised")
        self._close_requests.append(request)
        self._leader.event(CloseAsked(close.at_once))

    def _on_shard_file(self, request: Request, message: ShardWritten | ShardFailed) -> None:
        self._leader.ps.peers.member(request)
        if isinstance(message, ShardWritten):
            self.written(message.directory, message.file)
        else:
            self.not_written(message.directory, CheckpointError(message.error))
        request.reply(Done())
