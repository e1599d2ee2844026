"""What decides on the requests to a shard: the leader in this process, or in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zmqtrain.errors import ConfigError, ZmqTrainError
from zmqtrain.protocol.checkpoint import ShardFile
from zmqtrain.protocol.orders import Numbered, Roster
from zmqtrain.server.remains import Remains
from zmqtrain.server.state import Worker


class Decider:
    """Takes a shard's requests, and what comes of orders. Ps 0 has one kind, the others another."""

    def arrived(self, worker: Worker) -> Sequence[Numbered]:
        """Return the orders to carry out here now that a worker's request has arrived."""
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

    def remains(self) -> Remains | None:
        """Return what a group that is over hands on; no order is under way. None: nothing."""
        raise NotImplementedError

    # What comes of orders

    def applied(self, version: int, computed_on: Mapping[int, int], at: float) -> None:
        """The shard is at this version, by workers' gradients computed on those versions."""

    def refused(self, error: ConfigError) -> None:
        """The update rule has refused; the parameters are as they were before."""

    def switched(self, spec: str) -> None:
        """From this order on the policy is another."""

    def roster_begins(self, roster: Roster) -> None:
        """From this order on workers make steps by themselves."""

    def released_undecided(self, worker: Worker) -> None:
        """A worker may go on after a push that was decided on before it arrived here."""

    def written(self, directory: str, file: ShardFile) -> None:
        """This shard's part of the checkpoint in ``directory`` is durable."""

    def not_written(self, directory: str, error: ZmqTrainError) -> None:
        """This shard's part of the checkpoint in ``directory`` could not be written."""
