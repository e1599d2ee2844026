"""The leader of a job: it turns events into orders for every shard.

The coordinator, which is pure, decides; the leader adds clock, journal and messages. Its host, ps
0, calls it with events and carries out its orders.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.config.cluster import Role
from zmqtrain.coordination import events
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.delivery import OrderDelivery
from zmqtrain.coordination.endings import divergence
from zmqtrain.coordination.figures import JobFigures
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.measuring import Measuring
from zmqtrain.coordination.peers import Peer, PeerTable
from zmqtrain.coordination.state import pack, unpack
from zmqtrain.errors import ExitCode, ProtocolError
from zmqtrain.job_checks import ENDLESS
from zmqtrain.policies import make_policy
from zmqtrain.protocol.checkpoint import Saved, WorkerMark
from zmqtrain.protocol.orders import Numbered, Order, Switch
from zmqtrain.store.journal import Journal
from zmqtrain.store.segment import Segment
from zmqtrain.wire.control import Extend
from zmqtrain.wire.messages import Arrived, ShardReport

log = logging.getLogger(__name__)


def nothing() -> None:
    """Do nothing."""


class RosterHost(Protocol):
    """Host of a roster, whose workers make steps by themselves."""

    def halt(self, worker: int | None = None) -> events.Stepped | None:
        """End the roster, or only take the seat of a worker; return its progress."""

    def close(self) -> None:
        """Remove a roster that has ended."""


class Leader:
    """Journals events, has the coordinator decide, and delivers the orders to every shard."""

    def __init__(
        self,
        host: JobActor,
        peers: PeerTable,
        segment: Segment,
        carry_out: Callable[[Sequence[Numbered]], None],
        *,
        on_change: Callable[[], None] = nothing,
        board: RosterHost | None = None,
    ) -> None:
        """``host``: ps 0. ``segment``: holds the journal. ``carry_out``: executor of orders.

        ``on_change`` is called after every event and failure. ``board``: None without rosters.
        """
        self.job, self.timing, self.metrics = host.job, host.timing, host.metrics
        self.peers, self.plan = peers, host.plan
        saved = self._saved_given if self.plan.hands_over else None
        self.delivery = OrderDelivery(host, peers, segment.words, saved)
        self._measuring = self._new_measuring()
        self._before_held: Saved | None = None  # the content of a checkpoint
        self.policy = self.job.policy
        self.generation = 0  # none has begun
        self.figures = JobFigures(self.job, peers, self.metrics)
        self.failure = ""  # why the job cannot go on
        self.failure_code = ExitCode.OK
        self.waiting_since: dict[int, float] = {}  # arrival of each worker's last request
        self._journal = Journal(segment)
        self._carry_out = carry_out
        self._on_change, self._board = on_change, board
        self._later: list[Callable[[], None]] = []  # until the roster is over
        self._is_over = False
        self.coordinator = self._coordinator_from(0, Ledger())
        self.epoch_batches = 0  # as the chief counts them
        self.peopled_at = time.monotonic()  # when a worker was last live
        if self.job.steps < ENDLESS:
            self.metrics.global_step_target.set(self.job.steps)
        self.metrics.expected_workers.set(self.plan.workers)
        self.figures.show_policy(self.policy)

    @property
    def has_begun(self) -> bool:
        """Whether there is a generation; before the first one nothing is decided."""
        return self.generation > 0

    @property
    def step(self) -> int:
        return self.coordinator.version

    @property
    def all_delivered(self) -> bool:
        """Whether every reachable shard has carried out all decisions.

        Orders go to all shards. Under a policy that is not coordinated, a worker's push is at all
        shards once the worker reports that it has finished.
        """
        stopped = self.coordinator.workers_by_state["stopped"]
        peers = [self.peers.get(Role.WORKER, worker) for worker in stopped]
        have_finished = all(peer and peer.finished for peer in peers)
        is_done = self.delivery.is_done and not self._measuring.held
        return self.has_begun and is_done and have_finished

    @property
    def handlers(self) -> dict[type, Callable[[Request, Any], None]]:
        return {Arrived: self.on_arrived, ShardReport: self.on_shard_report}

    def begin(
        self, generation: int, version: int, ledger: Ledger, learning_rate: float | None = None
    ) -> bool:
        """Begin a generation, whose shards are at ``version``, with the current workers.

        ``learning_rate`` None: the optimizer's. Return False if a killed host could not continue.
        """
        self.generation = generation
        self.delivery.begin(self.policy)
        self.waiting_since.clear()
        if self.job.epochs and ledger.limit is None:
            ledger.limit = 0  # the chief begins the first epoch
        self.coordinator = self._coordinator_from(version, ledger, learning_rate)
        self._measuring = self._new_measuring()
        for peer in self.peers.workers():
            self.coordinator.handle(events.Joined(peer.index, peer.incarnation))
        if self.policy != self.job.policy:
            self.delivery.send_others([Switch(self.policy)])
        return self._begin_journal()

    def _new_measuring(self) -> Measuring:
        clips = self.job.update().clip_norm is not None
        shards = self.plan.shards
        return Measuring(shards if clips and shards > 1 else 0)

    def _coordinator_from(
        self, version: int, ledger: Ledger, learning_rate: float | None = None
    ) -> Coordinator:
        return Coordinator(
            policy=make_policy(self.policy),
            shards=self.plan.shards,
            workers=self.plan.workers,
            steps=self.job.steps,
            version=version,
            ledger=ledger,
            lookahead=self.job.prefetch,
            learning_rate=learning_rate,
            makes_rosters=self._board is not None,
            evaluate_every=self.job.evaluate_every,
        )

    def recover(self, generation: int) -> None:
        """Continue a killed leader: repeat its decisions, carry out unfinished orders."""
        self.generation = generation
        state, *journaled = (unpack(entry) for entry in self._journal.read())
        self.coordinator, self._measuring = state["coordinator"], state["measuring"]
        self.policy = state["policy"]
        self.delivery.restore(state["delivery"])
        for event in journaled:
            orders = self._given(event, self._decided(event))
            self._follow_switches(orders)
            self.delivery.give(orders, again=True)
        self.delivery.resume()
        self._carry_out(self.delivery.due())
        self._begin_journal()
        for peer in self.peers.workers():
            if (member := self.coordinator.members.get(peer.index)) is not None:
                peer.pushes += member.unpushed
        self.figures.level_steps()  # the steps at which they joined are unknown
        self._reconcile()

    def end(self) -> None:
        """Decide nothing more: the chief has ended the run and saved the last checkpoint."""
        self._is_over = True

    def fail(self, code: ExitCode, text: str) -> None:
        """Fail the job; the chief will end it with this text."""
        if self.failure:
            return
        log.error("%s", text)
        self.failure, self.failure_code = text, code
        self.event(events.GivenUp(int(code), text))
        self._on_change()

    # Arrivals and reports

    def joined(self, peer: Peer) -> None:
        if peer.is_worker:
            others = (other.pushes for other in self.peers.workers() if other is not peer)
            peer.joined_at = peer.pushes = min(others, default=0)
            self.event(events.Joined(peer.index, peer.incarnation))

    def left(self, peer: Peer) -> None:
        if peer.is_worker:
            self.waiting_since.pop(peer.index, None)
            self.metrics.worker_step.forget(peer.index)
            self.event(events.Left(peer.index))

    def arrived(self, event: events.PullArrived | events.PushArrived) -> Sequence[Numbered]:
        """Return the host's orders after the arrival of a worker's request at the host."""
        self.waiting_since[event.worker] = time.monotonic()
        if isinstance(event, events.PushArrived):
            sequence = event.sequence + event.batches - 1  # noted for later ones when it is handled
            self.figures.show_worker(self.coordinator, event.worker, sequence, event.loss)
        return self.handle(event)

    def on_arrived(self, request: Request, arrived: Arrived) -> None:
        peer = self.peers.member(request)
        if not self.has_begun or request.envelope.generation != self.generation:
            return
        columns = arrived.workers, arrived.incarnations, arrived.sequences, arrived.finite
        if len(set(map(len, columns))) > 1:
            raise ProtocolError(f"{peer} reports pushes in columns of different lengths")
        self.delivery.answer(peer.index)
        self.event(events.PushesReported(peer.index, arrived))

    def on_shard_report(self, request: Request, report: ShardReport) -> None:
        peer = self.peers.member(request)
        if request.envelope.generation != self.generation:
            return
        if report.orders > self.delivery.sent:
            raise ProtocolError(f"{peer} reports order {report.orders} of {self.delivery.sent}")
        is_first = peer.report is None
        peer.report = report
        if is_first:  # of a life or a generation: earlier orders did not reach it
            self.delivery.send_missing(peer)
        self._carry_out(self.delivery.due())
        if report.measured:
            if not re.fullmatch("[0-9a-f]{1,200}", report.square):
                raise ProtocolError(f"{peer} reports the square {report.square!r:.80}")
            self.measured(events.Measured(peer.index, report.measured, int(report.square, 16)))
        if report.failure:
            self.fail(ExitCode.USAGE, f"{peer} cannot update its parameters: {report.failure}")

    def measured(self, event: events.Measured) -> None:
        """Note the square that a shard has measured, unless it is known."""
        if self._measuring.lacks(event):
            self.event(event)

    def _saved_given(self) -> Saved | None:
        """Return the content of a checkpoint after all orders given so far, None: unknown."""
        return self._before_held if self._measuring.held else self.saved()

    def saved(self) -> Saved:
        """Return the content of a checkpoint after all orders so far, without files."""
        coordinator = self.coordinator
        marks = tuple(
            WorkerMark(worker, member.incarnation, member.sequence)
            for worker, member in coordinator.members.items()
        )
        ledger, rate = coordinator.ledger.state(), coordinator.learning_rate
        return Saved(coordinator.version, self.policy, ledger, marks=marks, learning_rate=rate)

    def holds_lease(self, worker: int, batch: int, batches: int = 1) -> bool:
        """Return whether this worker may push ``batches`` batches, of which this is the first.

        A worker that pushes has left its roster, so this ends the roster.
        """
        if self.coordinator.roster is not None:
            self.at_rest(nothing)
        return self.coordinator.ledger.holds(worker, batch, batches)

    def at_rest(self, call: Callable[[], None], worker: int | None = None) -> None:
        """Call when no roster is in force; one in force is ended first.

        ``worker``: one that has died, whose last step the roster may still count.
        """
        if self._board is None or self.coordinator.roster is None:
            call()
            return
        self._later.append(call)
        self.stepped(self._board.halt(worker))

    def stepped(self, event: events.Stepped | None) -> None:
        """Note the progress of a roster; None: no news.

        Only its end is journaled, which releases waiting calls: the board survives a killed host.
        """
        if event is None or self._board is None or self.coordinator.roster is None:
            return
        before = self.step
        if event.over:
            self._carry_out(self._decide(event))
        else:
            self.coordinator.handle(event)
        if more := self.step - before:
            self.figures.stepped(self.coordinator, more, event.losses)
        if event.over:
            self._board.close()
            calls, self._later = self._later, []
            for call in calls:
                self.at_rest(call)

    # Events and orders

    def event(self, event: events.Event) -> None:
        """Handle an event and have the host carry out its orders."""
        self._carry_out(self.handle(event))

    def handle(self, event: events.Event) -> Sequence[Numbered]:
        """Journal an event, decide on it, deliver orders, return the host's; none after the end."""
        if not self.has_begun or self._is_over:
            return ()
        if self.coordinator.roster is not None:
            dead = event.worker if isinstance(event, events.Left) else None
            self.at_rest(partial(self.event, event), dead)
            return ()
        return self._decide(event)

    def _decide(self, event: events.Event) -> Sequence[Numbered]:
        if isinstance(event, Extend) and make_policy(self.policy).staleness_bound is not None:
            # Workers with one batch less in a pass are not slower.
            self.figures.level_steps()
        entry = pack(event)
        if not self._journal.append(entry):
            self._begin_journal()
            self._journal.append(entry)
        decided = self._decided(event)
        self.figures.count_waits(event, decided, self.waiting_since, time.monotonic())
        orders = self._given(event, decided)
        self._follow_switches(orders)
        self.delivery.give(orders)
        if text := divergence(self.coordinator.refused, self.job.max_nonfinite):
            self.fail(ExitCode.DIVERGED, text)
        self._on_change()
        return self.delivery.due()

    def _decided(self, event: events.Event) -> list[Order]:
        if self.plan.hands_over and not self._measuring.held:
            self._before_held = self.saved()
        return [] if isinstance(event, events.Measured) else self.coordinator.handle(event)

    def _given(self, event: events.Event, decided: list[Order]) -> list[Order]:
        """Return the orders to give after an event, on which the coordinator has decided."""
        if not isinstance(event, events.Measured):
            return self._measuring.passed(decided)
        if orders := self._measuring.measured(event):
            self._before_held = None  # nothing was saved before an update that is held back now
        return orders

    def _reconcile(self) -> None:
        """Handle joins and leaves of workers that the journal lacks."""
        coordinator = self.coordinator
        live = {peer.index: peer for peer in self.peers.workers()}
        for worker in [worker for worker in coordinator.members if worker not in live]:
            self.event(events.Left(worker))
        for worker, peer in live.items():
            member = coordinator.members.get(worker)
            if member is None or member.incarnation != peer.incarnation:
                self.event(events.Joined(worker, peer.incarnation))

    def _follow_switches(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, Switch):
                if order.policy != self.policy:
                    self.metrics.policy_switches.inc()
                self.policy = order.policy
                self.figures.show_policy(self.policy)

    def _begin_journal(self) -> bool:
        """Replace the entries of the journal by the whole state."""
        state = {
            "coordinator": self.coordinator,
            "measuring": self._measuring,
            "policy": self.policy,
            "delivery": self.delivery.state(),
        }
        try:
            reason = "" if self._journal.begin(pack(state)) else "it is too large"
        except TypeError as error:
            reason = str(error)
        if reason:
            log.warning("a killed ps 0 will go back to the last checkpoint: %s", reason)
            self._journal.give_up()
        return not reason
