"""What a ps holds: a shard, the generation it is of, and the requests that wait for answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from zmqtrain.actors.actor import Request
from zmqtrain.config.cluster import Task
from zmqtrain.store.marks import Marks, Result
from zmqtrain.store.segment_layout import ORDERS
from zmqtrain.store.shard import Shard
from zmqtrain.wire.messages import Push


@dataclass(slots=True)
class PendingPull:
    """A worker's pull that has not been answered."""

    incarnation: int
    request: Request | None  # None: it was received by a process that was killed
    sequence: int = 0  # among the requests of this life
    result: Literal["joined"] = "joined"
    reason: str = ""
    # Looked up in the module at each call, as everywhere: a simulated clock may be there.
    arrived_at: float = field(default_factory=lambda: time.monotonic())


@dataclass(slots=True)
class PendingPush:
    """A worker's push that has not been answered."""

    incarnation: int
    request: Request | None  # None: it was received by a process that was killed
    sequence: int
    version: int  # that the gradient was computed on
    batch: int
    examples: int
    loss: float
    finite: bool
    result: Result = ""  # "": nothing is decided yet
    reason: str = ""
    arrived_at: float = field(default_factory=lambda: time.monotonic())

    @classmethod
    def of(cls, request: Request, push: Push) -> PendingPush:
        """Return what a push that has just arrived waits for."""
        pending = cls(
            request.sender.incarnation,
            request,
            push.sequence,
            push.version,
            push.batch,
            push.examples,
            push.loss,
            push.finite,
        )
        if not push.finite:
            pending.result = "refused"
            pending.reason = "the loss or the gradient is NaN or infinite"
        return pending


Pending: TypeAlias = PendingPull | PendingPush


class ShardState:
    """One shard and what is known of its workers' requests. No event loop, no sockets.

    ``generation`` is written where one begins (parameters.py) and where one is found again
    (recovery.py). ``pending``, by worker: the receiver enters a request, the executor takes it out
    with its answer; a worker that leaves, or a new generation, takes it out without one.
    """

    def __init__(self, task: Task, shard: Shard, marks: Marks) -> None:
        self.task = task
        self.shard = shard
        self.marks = marks
        self.generation = 0  # 0: none has begun
        self.restored_from: Path | None = None  # the checkpoint that this generation began from
        self.pending: dict[int, Pending] = {}
        self.duplicates = 0  # requests that had been seen before

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

    def decided(self, worker: int, result: Result, reason: str = "") -> PendingPush | None:
        """Note the result of the push that a worker waits for; return it if still pending."""
        pending = self.pending.get(worker)
        if not isinstance(pending, PendingPush):
            return None
        pending.result, pending.reason = result, reason
        self.marks.note_result(worker, pending.sequence, result)
        return pending
