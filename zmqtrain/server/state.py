"""The state of a ps: a shard, its generation, and its workers; how its next life restores it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from zmqtrain.actors.actor import Request
from zmqtrain.config.cluster import Role, Task
from zmqtrain.coordination.peers import Peer, PeerTable
from zmqtrain.coordination.state import pack, unpack
from zmqtrain.errors import RefusedError, ZmqTrainError
from zmqtrain.models.tables import RowsOf
from zmqtrain.models.weights import weight_of
from zmqtrain.protocol.orders import Answer
from zmqtrain.store.changes import ACCUMULATE, Change, Contribution
from zmqtrain.store.journal import Marks
from zmqtrain.store.manifest import Manifest
from zmqtrain.store.segment_layout import GENERATION, INCARNATION, ORDERS
from zmqtrain.store.shard import Shard
from zmqtrain.wire.messages import Pull, PullReply, Push, PushReply

log = logging.getLogger(__name__)

SPARE = 16  # buffers beyond those of the workers expected, for more workers and later lives

Result: TypeAlias = Literal["applied", "accumulated", "dropped", "refused"]
"""The result of a push."""


@dataclass(slots=True)
class Pending:
    """A worker's pull or push that has not been answered."""

    message: Pull | Push
    request: Request | None  # None: the process that received it was killed
    result: Result | None = None  # of a push; None: nothing is decided yet
    reason: str = ""
    is_ordered: bool = False  # the shard itself has given orders for it
    # Looked up in the module at each call, as everywhere: a simulated clock may be there.
    arrived_at: float = field(default_factory=lambda: time.monotonic())

    @property
    def sequence(self) -> int:
        """Sequence of a push, 0 of a pull."""
        return self.message.sequence if isinstance(self.message, Push) else 0

    @property
    def is_decided(self) -> bool:
        """Whether it can be answered: a pull always can."""
        return self.result is not None or isinstance(self.message, Pull)

    def reply(self, order: Answer, version: int, rate: float | None) -> PullReply | PushReply:
        """Return the answer to the worker by this order; ``rate``: see :class:`PullReply`."""
        given: dict[str, Any] = {
            "version": version,
            "batches": order.batches,
            "stop": order.stop,
            "local_steps": order.local_steps,
            "learning_rate": rate,
            "sends_difference": order.sends_difference,
        }
        if isinstance(self.message, Pull) or self.result is None:
            return PullReply(**given)
        return PushReply(
            sequence=self.message.sequence,
            result=self.result,
            reason=self.reason,
            held_s=time.monotonic() - self.arrived_at,
            **given,
        )


@dataclass(slots=True)
class WorkerRecord:
    """A live worker of one shard, with at most one unanswered request."""

    index: int
    incarnation: int
    identity: tuple[str, str, str, str]  # nonce, process, metrics, process identity
    lane: str = "tcp"
    buffer: int = -1  # index of where its gradients go in the segment
    pending: Pending | None = None
    reply: PullReply | PushReply | None = None  # the last one, until the next request
    early: Answer | None = None  # the last answer to a request that had not come yet
    chunks: set[int] = field(default_factory=set)  # received for its next push
    rows: dict[int, list[RowsOf]] = field(default_factory=dict)  # the same, by index of message
    unacknowledged_nbytes: int = 0  # of both
    lookups: dict[int, Callable[[], None]] = field(default_factory=dict)  # by request

    def __str__(self) -> str:
        return f"worker {self.index}"

    @property
    def has_pulled(self) -> bool:
        return self.pending is not None or self.reply is not None

    @property
    def pushed(self) -> Push | None:
        """The unanswered push, if there is one."""
        message = self.pending.message if self.pending is not None else None
        return message if isinstance(message, Push) else None

    @property
    def received(self) -> int:
        """Sequence of the last push, 0 if there was none."""
        return self.answered if self.pending is None else self.pending.sequence

    @property
    def answered(self) -> int:
        """Sequence of the last answered push, 0 without one or while a request is pending."""
        return self.reply.sequence if isinstance(self.reply, PushReply) else 0

    def owes(self, sequence: int) -> bool:
        """Return whether a push is still to be answered, or to come; False for 0."""
        is_pending = self.pending is not None and self.pending.sequence == sequence
        return sequence > 0 and (is_pending or sequence > self.received)

    def packed(self) -> list[Any]:
        """Return what :meth:`unpacked` restores: a life, and its pending request or last reply."""
        last: list[Any] = [self.reply]
        if (pending := self.pending) is not None:
            last = [pending.message, pending.result, pending.reason]
        return [self.incarnation, [*self.identity], self.lane, self.buffer, self.early, *last]

    @classmethod
    def unpacked(cls, index: int, packed: list[Any]) -> WorkerRecord:
        incarnation, identity, lane, buffer, early, last, *decided = packed
        worker = cls(index, incarnation, identity, lane, buffer, early=early)
        if isinstance(last, Pull | Push):
            worker.pending = Pending(last, None, *decided)
        else:
            worker.reply = last
        return worker

    def refuse(self, error: ZmqTrainError) -> None:
        """Refuse its pending request, if the sender is still there."""
        if self.pending is not None and self.pending.request is not None:
            self.pending.request.refuse(error)

    @property
    def is_released(self) -> bool:
        """Whether an order answered its pending request before it came."""
        pending, early = self.pending, self.early
        return pending is not None and early is not None and early.sequence == pending.sequence


class ShardState:
    """One shard and its live workers, by index. No event loop, no sockets.

    ``generation`` is set by ParameterAccess and by recovery. The receiver sets a worker's
    ``pending``, and the executor clears it with the answer.

    Two lives of workers never share a gradient buffer of the segment: a worker that counts as dead
    may still write to its own. Another worker gets it once its lock is free and no update needs it.
    A process with a new life gives up its first buffer when it has the second one.
    """

    def __init__(self, task: Task, shard: Shard, workers: int = 1) -> None:
        """``workers``: the expected number."""
        self.task = task
        self.shard = shard
        self.marks = Marks(shard.segment)
        self._most_buffers = 2 * workers + SPARE
        self.generation = 0  # 0: none has begun
        self.restored: Manifest | None = None  # with which this generation began
        self.workers: dict[int, WorkerRecord] = {}
        self.duplicates = 0  # pushes that had been seen before
        self._changed: dict[int, WorkerRecord] = {}  # workers whose pushes the last change decided

    @property
    def initialised(self) -> bool:
        """Whether the shard holds parameters."""
        return self.generation > 0

    @property
    def version(self) -> int:
        return self.shard.version

    @property
    def orders(self) -> int:
        """Number of the last order of this generation that was carried out."""
        return self.shard.segment.words[ORDERS]

    @orders.setter
    def orders(self, number: int) -> None:
        self.shard.segment.words[ORDERS] = number

    def pending(self) -> list[tuple[WorkerRecord, Pending]]:
        """Return the workers with unanswered requests, and the requests."""
        workers = self.workers.values()
        return [(each, each.pending) for each in workers if each.pending is not None]

    def join(self, peer: Peer) -> None:
        """Begin a new life of a worker; staged gradients of the previous one stay."""
        identity = (peer.nonce, peer.process, peer.metrics, peer.process_identity)
        worker = self.workers[peer.index] = WorkerRecord(peer.index, peer.incarnation, identity)
        self.keep(worker)

    def leave(self, index: int) -> WorkerRecord | None:
        """Forget a worker and return it; its staged gradient stays."""
        worker = self.workers.pop(index, None)
        self._changed.pop(index, None)
        self._keep_staged(index)
        return worker

    def forget_workers(self) -> None:
        """Forget all workers and their staged gradients."""
        self.workers.clear()
        self._changed.clear()
        self.marks.clear()

    def assign_buffer(self, worker: WorkerRecord) -> None:
        """Give a worker a gradient buffer, unless it has one.

        Raises:
            RefusedError: there are too many workers.
            SegmentError: there is no memory for one more.
        """
        if worker.buffer < 0:
            number = self._free_buffer()
            self.shard.segment.gradient(number)
            worker.buffer = number

    def has_dropped_its_lock(self, peer: Peer) -> bool:
        """Return whether a worker's process has ended, according to its lock in the kernel.

        A worker that has pulled on lane shm holds the lock of its buffer for as long as it lives.
        """
        worker = self.workers.get(peer.index) if peer.is_worker else None
        if worker is None or worker.lane != "shm" or not worker.has_pulled:
            return False
        return not self.shard.segment.is_held(worker.buffer)

    def keep(self, worker: WorkerRecord) -> None:
        """Write a worker's state into the segment, for the next life of this ps."""
        self._changed.pop(worker.index, None)
        if not self.shard.safe:
            return
        mark = pack([self.shard.staged(worker.index), *worker.packed()])
        if not self.marks.write(worker.index, mark):
            self._keep_staged(worker.index)  # too much to be kept: it will join again

    def decided(self, index: int, result: Result, reason: str = "") -> Push | None:
        """Note the result of a worker's pending push; return the push if there is one."""
        worker = self.workers.get(index)
        pending = worker.pending if worker is not None else None
        if worker is None or pending is None or not isinstance(pending.message, Push):
            return None
        pending.result, pending.reason = result, reason
        if result in ("applied", "accumulated"):
            self._changed[index] = worker
        else:
            self.keep(worker)
        return pending.message

    def keep_changed(self, _: object = None) -> None:
        """Keep the results of the last change; a push that was answered before costs no mark."""
        for worker in tuple(self._changed.values()):
            self.keep(worker)

    def _free_buffer(self) -> int:
        shard, used = self.shard, {worker.buffer for worker in self.workers.values()}
        for number in range(self._most_buffers):
            if not (number in used or shard.is_staged(number) or shard.segment.is_held(number)):
                return number
        raise RefusedError(
            f"{self.task} keeps gradients of at most {self._most_buffers} workers: start it with a "
            "larger --max-workers"
        )

    def _keep_staged(self, index: int) -> None:
        if self.shard.safe:
            self.marks.write(index, pack([self.shard.staged(index)]))


def recover(state: ShardState, peers: PeerTable) -> None:
    """Restore the state of a killed ps from the segment that it left.

    It finishes the shard's last change, and restores the workers with their pending requests.
    """
    began = time.monotonic()
    shard = state.shard
    change = shard.repair()
    state.generation = shard.segment.words[GENERATION]
    peers.outlive(shard.segment.words[INCARNATION])
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
