"""What decides on the requests to a shard: the leader in this process, or in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from zmqtrain.coordination.delivery import Numbered
from zmqtrain.server.executor import Report
from zmqtrain.server.state import Worker


class Decider(Protocol):
    """Takes a shard's requests and reports. Ps 0 has one kind, the others another."""

    def arrived(self, worker: Worker) -> Sequence[Numbered]:
        """Return the orders to carry out here now that a worker's request has arrived."""

    def reported(self, report: Report) -> None:
        """Handle the outcome of orders."""

    def at_rest(self, call: Callable[[], None]) -> None:
        """Call as soon as no roster of workers changes the shard by itself."""

    def begin(self) -> bool:
        """Begin with the shard's new generation; requests may be answered from now on.

        False: a killed ps could not recover it, and would go back to a checkpoint.
        """

    def recover(self) -> None:
        """Go on where a killed process was; its shard and requests are restored already."""
