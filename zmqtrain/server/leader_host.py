"""Ps 0, which hosts the leader: its shard's events go to the leader in the same process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zmqtrain.config.cluster import Role
from zmqtrain.coordination.admin_api import AdminApi
from zmqtrain.coordination.events import PullArrived, PushArrived
from zmqtrain.coordination.leader import Leader
from zmqtrain.coordination.ledger import Ledger, restored_ledger
from zmqtrain.coordination.membership import Peer
from zmqtrain.errors import ConfigError, FencedError, ZmqTrainError
from zmqtrain.protocol.checkpoint import ShardFile
from zmqtrain.protocol.orders import Numbered, Roster
from zmqtrain.server.board_host import BoardHost
from zmqtrain.server.decider import Decider
from zmqtrain.server.remains import Remains
from zmqtrain.server.state import ShardState, Worker
from zmqtrain.store.manifest import read_manifest


class LeaderHost(Decider):
    """Decides about shard 0 by asking the leader."""

    def __init__(
        self,
        state: ShardState,
        leader: Leader,
        admin: AdminApi,
        *,
        fingerprint: Mapping[str, str],
        carry_out: Callable[[Sequence[Numbered]], None],
        board: BoardHost,
    ) -> None:
        self._state = state
        self._leader = leader
        self._admin = admin
        self._fingerprint = fingerprint
        self._carry_out = carry_out
        self._board = board

    def arrived(self, worker: Worker) -> Sequence[Numbered]:
        push = worker.pushed
        if push is None:
            on_board = self._board.reaches(worker.index)
            return self._leader.arrived(PullArrived(worker.index, on_board))
        return self._leader.arrived(
            PushArrived(
                worker.index,
                push.sequence,
                push.batch,
                push.examples,
                push.finite,
                push.loss,
                push.sums,
            )
        )

    def joined(self, peer: Peer) -> None:
        """Report a task's new life to the leader."""
        if peer.role == Role.PS:
            self._admin.give_up_saves(FencedError(f"{peer} has a new life"))
        self._leader.joined(peer)

    def left(self, peer: Peer) -> None:
        """Report to the leader that a task has left, or that its lease has run out."""
        if peer.role == Role.PS:
            self._admin.ps_left(peer)
        self._leader.left(peer)

    def applied(self, version: int, computed_on: Mapping[int, int], at: float) -> None:
        self._leader.applied(version, computed_on, at)

    def refused(self, error: ConfigError) -> None:
        self._leader.fail(error.exit_code, str(error))

    def roster_begins(self, roster: Roster) -> None:
        self._board.begin(roster)

    def written(self, directory: str, file: ShardFile) -> None:
        self._admin.written(directory, file)

    def not_written(self, directory: str, error: ZmqTrainError) -> None:
        self._admin.not_written(directory, error)

    def at_rest(self, call: Callable[[], None]) -> None:
        self._leader.at_rest(call)

    def begin(self) -> bool:
        state = self._state
        ledger = Ledger()
        if state.restored_from is not None:
            ledger = restored_ledger(read_manifest(state.restored_from), self._fingerprint)
        self._admin.forget_saves()
        rate = state.shard.learning_rate
        return self._leader.begin(state.generation, state.version, ledger, rate)

    def remains(self) -> Remains | None:
        """What the leader has decided counts; so this shard has yet to carry out its own rest."""
        delivery = self._leader.delivery
        last = delivery.last(self._state.generation)
        if last is None:
            return None
        return Remains(self._state.shard, last, last.end, delivery.undone)

    def recover(self) -> None:
        self._leader.recover(self._state.generation)
        self._board.recover(is_over=self._leader.coordinator.roster is None)
        for worker, _ in self._state.pending():
            self._carry_out(self.arrived(worker))
