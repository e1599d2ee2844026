"""Where a ps takes its orders from, and what it waits to have ordered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from zmqtrain.actors.actor import Request
from zmqtrain.coordination.membership import Peer
from zmqtrain.errors import ConfigError, ZmqTrainError
from zmqtrain.store.marks import Result
from zmqtrain.wire.messages import Push, ShardFile

if TYPE_CHECKING:
    from zmqtrain.server.executor import Applied


@dataclass(slots=True)
class Pending:
    """A push (or pull, sequence 0) that has not been answered."""

    incarnation: int
    request: Request | None  # None: it was received by a process that was killed
    sequence: int
    version: int = 0  # that the gradient was computed on
    batch: int = -1
    examples: int = 0
    loss: float = 0.0
    finite: bool = True
    result: Result | Literal["joined"] = "joined"
    reason: str = ""
    # Looked up in the module at each call, as everywhere: a simulated clock may be there.
    arrived_at: float = field(default_factory=lambda: time.monotonic())


class Direction(Protocol):
    """Where a ps takes its orders from: itself, if it is the leader, or ps 0."""

    policy: str

    def generation_began(self) -> None:
        """The shard holds parameters; pulls and pushes may be answered."""

    def recovered(self) -> None:
        """The shard is as a killed process left it; so are the workers and their pushes."""

    def switched(self, spec: str) -> None:
        """The policy is another from this order on."""

    def joined(self, peer: Peer) -> None:
        """A task has a new life."""

    def arrived(self, worker: int, pending: Pending) -> None:
        """A worker's push or pull lies ready here."""

    def check(self, worker: int, push: Push) -> None:
        """Raise ProtocolError if this push cannot be right."""

    def left(self, peer: Peer) -> None:
        """A task said goodbye, or its lease expired."""

    def applied(self, applied: Applied) -> None:
        """Some gradients became an update; called when they may have been answered already."""

    def cannot_update(self, error: ConfigError) -> None:
        """The update rule refused; the parameters are as they were before."""

    def written(self, directory: str, file: ShardFile) -> None:
        """This shard's part of a checkpoint is durable."""

    def not_written(self, directory: str, error: ZmqTrainError) -> None:
        """This shard's part of a checkpoint could not be written."""

    def watch(self) -> None:
        """Look at the clock; called a few times in a lease."""
