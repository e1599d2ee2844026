"""The decider on a shard's requests: the leader in this process, or in another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.coordination.peers import Peer
from zmqtrain.protocol.orders import Numbered
from zmqtrain.server.executor import Executor, OrderOutcome
from zmqtrain.server.orphaned_shard import OrphanedShard
from zmqtrain.server.state import ShardState, WorkerRecord

Handler = Callable[[Request, Any], None]


class Decider(ABC):
    """Takes a shard's requests and the outcomes of orders; a kind for ps 0, one for the others."""

    def __init__(self, actor: JobActor, state: ShardState) -> None:
        """``actor``: the ps."""
        self._actor = actor
        self._state = state
        self.executor = Executor(actor, state, self.note)

    @property
    @abstractmethod
    def handlers(self) -> dict[type, Handler]:
        """The handlers of its messages."""

    @abstractmethod
    def arrived(self, worker: WorkerRecord) -> Sequence[Numbered]:
        """Return this shard's orders after the arrival of a worker's request."""

    @abstractmethod
    def note(self, outcome: OrderOutcome) -> None:
        """Take the outcome of an order."""

    @abstractmethod
    def at_rest(self, call: Callable[[], None]) -> None:
        """Call as soon as no roster of workers changes the shard by itself."""

    @abstractmethod
    def begin(self) -> bool:
        """Begin the shard's new generation; return False if a killed ps could not recover it."""

    @abstractmethod
    def recover(self) -> None:
        """Continue a killed process, whose shard and requests are restored already."""

    @abstractmethod
    def orphan(self) -> OrphanedShard | None:
        """Return the shard for a hand-over after the group's end, None without one."""

    def joined(self, peer: Peer) -> None:
        """Note a new life of a task."""

    def left(self, peer: Peer) -> None:
        """Note that a task has left, or its lease has run out."""

    def watch(self) -> None:
        """Check deadlines."""

    def end(self) -> None:
        """Decide nothing more: the chief has ended the run."""

    def ended(self, reason: str) -> None:
        """Answer the requests that wait for the end of this ps."""
