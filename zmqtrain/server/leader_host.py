"""Ps 0, which hosts the leader: its shard's events go to the leader in the same process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zmqtrain.actors.task import JobActor
from zmqtrain.config.cluster import Role
from zmqtrain.coordination.admin_api import AdminApi
from zmqtrain.coordination.events import Measured, PullArrived, PushArrived
from zmqtrain.coordination.leader import Leader
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.peers import Peer, PeerTable
from zmqtrain.coordination.status import HostStatus
from zmqtrain.coordination.worker_watch import WorkerWatch
from zmqtrain.errors import FencedError
from zmqtrain.planning.job_fingerprint import restored_batches
from zmqtrain.protocol.orders import Numbered, Roster
from zmqtrain.server.board_host import BoardHost
from zmqtrain.server.decider import Decider, Handler
from zmqtrain.server.executor import Applied, OrderOutcome, Refused
from zmqtrain.server.orphaned_shard import OrphanedShard
from zmqtrain.server.peer_handlers import PeerHandlers
from zmqtrain.server.state import ShardState, WorkerRecord
from zmqtrain.wire.control import ShardWritten


class LeaderHost(Decider):
    """Decides on shard 0's requests by the leader, which it hosts."""

    def __init__(
        self,
        actor: JobActor,
        state: ShardState,
        peers: PeerTable,
        peer_handlers: PeerHandlers,
        host_status: Callable[[], HostStatus],
    ) -> None:
        """``actor``: the ps. ``host_status``: its own status, for the leader."""
        super().__init__(actor, state)
        self._peer_handlers = peer_handlers
        self._host_status = host_status
        self._board = BoardHost(state, actor.waits, actor.timing.peer_timeout_s)
        self._is_board_watched = False
        self.leader = Leader(
            actor,
            peers,
            state.shard.segment,
            self.executor.carry_out,
            on_change=lambda: self._admin.review(),
            board=self._board if actor.plan.exchange.is_board else None,
        )
        self._worker_watch = WorkerWatch(self.leader)
        self._admin = AdminApi(actor, self.leader, self._status)
        if actor.plan.shards > 1:
            actor.spawn(self.leader.delivery.keep_others())

    @property
    def handlers(self) -> dict[type, Handler]:
        return self.leader.handlers | self._admin.handlers

    def arrived(self, worker: WorkerRecord) -> Sequence[Numbered]:
        push = worker.pushed
        if push is None:
            on_board = self._board.reaches(worker.index)
            return self.leader.arrived(PullArrived(worker.index, on_board))
        return self.leader.arrived(PushArrived.of(worker.index, push.sequence, push))

    def note(self, outcome: OrderOutcome) -> None:
        match outcome:
            case Applied(version, _, staleness, _, at, is_round):
                figures = self.leader.figures
                figures.applied(self.leader.coordinator, version, staleness, at)
                figures.count_round(self._state.shard.moves if is_round else None)
            case Refused(error):
                self.leader.fail(error.exit_code, str(error))
            case Measured():
                self.leader.measured(outcome)
            case Roster():
                self.leader.stepped(self._board.begin(outcome))
                self._watch_board()
            case ShardWritten():
                self._admin.note_file(outcome)

    def joined(self, peer: Peer) -> None:
        if peer.role == Role.PS:
            self._admin.give_up_saves(FencedError(f"{peer} has a new life"))
        self.leader.joined(peer)

    def left(self, peer: Peer) -> None:
        if peer.role == Role.PS and peer.gone:  # else a later life of it takes its place
            self._admin.ps_left(peer)
        self.leader.left(peer)

    def at_rest(self, call: Callable[[], None]) -> None:
        self.leader.at_rest(call)

    def begin(self) -> bool:
        state = self._state
        ledger = Ledger()
        if state.restored is not None:
            fingerprint = self._peer_handlers.fingerprint
            ledger = Ledger.restored(restored_batches(state.restored, fingerprint))
        self._admin.forget_saves()
        rate = state.shard.learning_rate
        return self.leader.begin(state.generation, state.version, ledger, rate)

    def recover(self) -> None:
        self.leader.recover(self._state.generation)
        self._board.recover(is_over=self.leader.coordinator.roster is None)
        self._watch_board()
        for worker, _ in self._state.pending():
            self.executor.carry_out(self.arrived(worker))

    def orphan(self) -> OrphanedShard | None:
        """Return the shard with its unfinished orders, since all decisions of the leader count."""
        delivery = self.leader.delivery
        last = delivery.last(self._state.generation)
        if last is None:
            return None
        return OrphanedShard(self._state.shard, last, last.end, delivery.undone)

    def watch(self) -> None:
        self._worker_watch.check()
        self.leader.stepped(self._board.report())

    def end(self) -> None:
        self.leader.end()

    def ended(self, reason: str) -> None:
        self._admin.ended(reason)

    def _status(self) -> HostStatus:
        self.executor.count()  # the leader has the figures of all updates so far
        self.leader.stepped(self._board.report())
        status = self._host_status()
        status.task.step += self._board.made
        return status

    def _watch_board(self) -> None:
        if not self._is_board_watched:
            self._is_board_watched = True
            self._actor.spawn(self._follow_board())

    async def _follow_board(self) -> None:
        """Pass the progress of rosters, and the deaths of their workers, to the leader."""
        async for stepped in self._board.watch():
            if stepped is not None:
                self.leader.stepped(stepped)
                continue
            for peer in self._peer_handlers.end_leases():
                self.left(peer)
        self._is_board_watched = False
