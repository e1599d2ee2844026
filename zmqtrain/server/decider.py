"""What decides on the requests to a shard: the leader in this process, or in another."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from zmqtrain.actors.actor import Request
from zmqtrain.coordination.peers import Peer
from zmqtrain.observe.metrics import Metrics
from zmqtrain.protocol.orders import Numbered
from zmqtrain.server.executor import Executor, Outcome
from zmqtrain.server.orphaned_shard import OrphanedShard
from zmqtrain.server.state import ShardState, WorkerRecord

Handler = Callable[[Request, Any], None]


class Decider:
    """Takes a shard's requests, and what comes of orders. Ps 0 has one kind, the others another."""

    def __init__(
        self,
        state: ShardState,
        metrics: Metrics,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], bool],
        crash: Callable[[Exception], None],
        copies_sent: bool = False,
    ) -> None:
        """``copies_sent``: copy parameters before sending, since updates go on meanwhile."""
        self._state = state
        self._spawn = spawn
        self.executor = Executor(
            state, metrics, self.note, spawn=spawn, crash=crash, copies_sent=copies_sent
        )

    @property
    def handlers(self) -> dict[type, Handler]:
        """The handlers of the messages that it takes."""
        raise NotImplementedError

    def arrived(self, worker: WorkerRecord) -> Sequence[Numbered]:
        """Return the orders to carry out here now that a worker's request has arrived."""
        raise NotImplementedError

    def note(self, outcome: Outcome) -> None:
        """Take what came of an order."""
        raise NotImplementedError

    def at_rest(self, call: Callable[[], None]) -> None:
        """Call as soon as no roster of workers changes the shard by itself."""
        raise NotImplementedError

    def begin(self) -> bool:
        """Begin with the shard's new generation; requests may be answered from now on.

        False: a killed ps could not recover it, and would go back to a checkpoint.
        """
        raise NotImplementedError

    def recover(self) -> None:
        """Go on where a killed process was; its shard and requests are restored already."""
        raise NotImplementedError

    def orphan(self) -> OrphanedShard | None:
        """Return what a group that is over hands on; no order is under way. None: nothing."""
        raise NotImplementedError

    def joined(self, peer: Peer) -> None:
        """A task has a new life. Tasks join the leader as well as other ps."""

    def left(self, peer: Peer) -> None:
        """A task has left, or its lease has run out."""

    def watch(self) -> None:
        """Look after what may take too long."""

    def end(self) -> None:
        """The chief has ended the run: nothing more counts."""

    def ended(self, reason: str) -> None:
        """This ps ends: answer the requests that wait for that."""
