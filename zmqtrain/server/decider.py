"""Who decides about the requests to a shard: the leader in the same process, or another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zmqtrain.coordination.delivery import Numbered
from zmqtrain.server.executor import Report
from zmqtrain.server.state import Pending


class Decider(Protocol):
    """What a shard's requests and reports are given to. Ps 0 has one kind, the others another."""

    def arrived(self, worker: int, pending: Pending) -> Sequence[Numbered]:
        """Return the orders to carry out here now that a worker's request lies ready."""

    def reported(self, report: Report) -> None:
        """Take up what came of orders."""

    def begin(self) -> bool:
        """Begin with the shard's new generation; requests may be answered from now on.

        False: a killed ps cannot go on with it, but goes back to a checkpoint.
        """

    def recover(self) -> None:
        """Go on where a killed process was; the shard and its requests are as it left them."""
