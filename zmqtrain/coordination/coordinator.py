"""The coordinator: events in, orders for every shard out. Pure, like the policies.

It knows the workers, asks the policy, leases batches, stops the run at the last step, and changes
the policy at a version barrier. It knows no clock, no socket and no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Literal, TypeAlias, get_args

from zmqtrain.coordination import events
from zmqtrain.coordination.arrivals import Arrivals
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.errors import ConfigError
from zmqtrain.policies import Decision, Policy, Release, make_policy
from zmqtrain.policies.base import Lockstep
from zmqtrain.protocol.orders import (
    Accumulate,
    Answer,
    Apply,
    Drop,
    Order,
    Rate,
    Reduce,
    Roster,
    Snapshot,
    Switch,
)
from zmqtrain.store.segment_layout import SEATS
from zmqtrain.wire.control import Close, Extend, Save, SetRate, SwitchPolicy
from zmqtrain.wire.messages import Arrived

Stage: TypeAlias = Literal["joining", "waiting", "computing", "starved", "spare", "stopped"]
"""State of a live worker, in order: its pull has not arrived; the policy holds it; it was released
and has not pushed since; it may go on, but has no batch; it has a batch, but others compute all
that the job still needs; it was sent a stop."""


@dataclass(slots=True)
class WorkerState:
    """A live worker, as the coordinator sees it."""

    incarnation: int
    state: Stage = "joining"
    sequence: int = 0  # last push that has arrived on all shards, 0: none
    arriving: int = 0  # push that has arrived on some shards
    parts: int = 0  # bit i: on shard i
    push: events.PushArrived | None = None  # its part on shard 0
    finite: bool = True  # False if a part is not
    on_board: bool = False  # it has the shard mapped
    unpushed: int = 0  # steps without a push of their own: in rosters, and in rounds but the last


@dataclass
class Coordinator:
    """Decides for all shards, at a cost that does not depend on the number of workers.

    It is plain data, with members, ledger and policies: see :mod:`.state`.
    """

    policy: Policy
    _: KW_ONLY
    shards: int
    steps: int  # global step at which the job needs no more gradients
    version: int = 0
    lookahead: int = 1  # batches leased to a worker beyond the one it computes on
    ledger: Ledger = field(default_factory=Ledger)
    arrivals: Arrivals = field(default_factory=Arrivals)
    members: dict[int, WorkerState] = field(default_factory=dict)
    workers_by_state: dict[Stage, set[int]] = field(
        default_factory=lambda: {state: set() for state in get_args(Stage)}
    )
    undecided: set[int] = field(default_factory=set)  # workers whose pushes the policy keeps
    next_policy: Policy | None = None
    learning_rate: float | None = None  # in place of the optimizer's
    closing: bool = False  # the run ends once no worker computes
    exit_code: int = 0  # of a run that was ended early
    reason: str = ""  # why it was
    applied: int = 0  # gradients that counted, accumulated ones included
    dropped: int = 0
    refused: int = 0  # pushes with non-finite gradients
    makes_rosters: bool = False  # workers may make steps by themselves
    evaluate_every: int = 0  # each shard may be copied then: no roster or round goes over it
    roster: Roster | None = None  # in force; until it is over only Stepped is handled
    stepped: events.Stepped | None = None  # last report of this roster
    rosters: int = 0  # number of rosters so far
    workers: InitVar[int | None] = None  # expected by the policy; None: it has begun

    make_policy = staticmethod(make_policy)

    def __post_init__(self, workers: int | None) -> None:
        if workers is not None:
            self.policy.start(self.version, workers)

    @property
    def finished(self) -> bool:
        return self.version >= self.steps

    @property
    def is_pass_over(self) -> bool:
        """Whether every batch of the pass is counted, so that no worker computes."""
        return self.ledger.is_at_limit and not self.finished

    def handle(self, event: events.Event) -> list[Order]:
        """Return the orders for every shard that follow from this event."""
        match event:
            case events.PushArrived():
                return self._push_arrived(event)
            case events.PushesReported(shard, arrived):
                return self._pushes_reported(shard, arrived)
            case events.PullArrived():
                return self._pull_arrived(event)
            case events.Stepped():
                self._stepped(event)
                return []
            case events.Joined() | events.Left():
                return self._life_changed(event)
            case Save(directory):
                return [Snapshot(directory)]
            case SetRate(rate):
                self.learning_rate = rate
                return [Rate(rate)]
            case SwitchPolicy(spec):
                self.next_policy = self.make_policy(spec)
            case Close(at_once, exit_code, reason):
                self.closing = True
                self._note_end(exit_code, reason)
                return self._orders([], at_once=at_once)
            case Extend(limit):
                self._extend(limit)
            case events.GivenUp(exit_code, reason):
                self._note_end(exit_code, reason)
                self.steps = self.version
        return self._orders([])

    def _note_end(self, exit_code: int, reason: str) -> None:
        """Note the job's end, unless it has one already."""
        if not self.finished and not self.reason:
            self.exit_code, self.reason = exit_code, reason

    def _life_changed(self, event: events.Joined | events.Left) -> list[Order]:
        orders = self._left(event.worker)
        if isinstance(event, events.Joined):
            self.members[event.worker] = WorkerState(event.incarnation)
            self.workers_by_state["joining"].add(event.worker)
        return orders

    def _left(self, worker: int) -> list[Order]:
        """Remove a worker; release those that waited for it, and lease its batches again."""
        member = self.members.pop(worker, None)
        if member is None:
            return []
        self.workers_by_state[member.state].remove(worker)
        self.undecided.discard(worker)
        self.ledger.leave(worker)
        self.arrivals.leave(worker)
        is_in = member.state in ("waiting", "computing") and not self.finished
        decisions = self.policy.leave(worker) if is_in else []
        return self._orders(decisions)

    def _stepped(self, event: events.Stepped) -> None:
        roster = self.roster
        if roster is None:
            return
        more = event if self.stepped is None else event.since(self.stepped)
        self.ledger.advance(roster.workers, more)
        if isinstance(self.policy, Lockstep):
            self.policy.advance(more.steps)
        self.version += more.steps
        self.applied += more.steps * len(roster.workers)
        for worker in roster.workers:
            self.members[worker].unpushed += more.steps
        self.stepped = event
        if event.over:
            self.roster = self.stepped = None

    def _begin_roster(self, orders: list[Order]) -> None:
        """Let the workers make steps by themselves, if all of them have been released just now."""
        released = [order for order in orders if isinstance(order, Answer)]
        workers = sorted(self.workers_by_state["computing"])
        is_level = isinstance(self.policy, Lockstep) and self.policy.is_level
        if not (
            is_level
            and len(released) == len(workers) == len(self.members)
            and 0 < len(workers) <= SEATS
            and all(member.on_board for member in self.members.values())
        ):
            return
        # The coordinator itself makes the last step, and the one before an evaluation.
        steps = self._up_to_evaluation() - 1
        self.roster = roster = self.ledger.roster(workers, steps, self.lookahead)
        if roster is not None:  # it must be there when they are released
            self.rosters += 1
            orders.insert(orders.index(released[0]), roster)

    def _pull_arrived(self, event: events.PullArrived) -> list[Order]:
        worker, member = event.worker, self.members.get(event.worker)
        if member is None or member.state != "joining":
            return []
        member.on_board = event.on_board
        self._change(worker, "waiting")
        return self._orders([] if self.finished else self.policy.join(worker))

    def _push_arrived(self, event: events.PushArrived) -> list[Order]:
        member = self.members.get(event.worker)
        if member is None or event.sequence <= member.sequence:
            return []  # it is known
        member.push = event
        member.unpushed += event.batches - 1
        return self._part_arrived(event.worker, member, event.sequence, 1, event.finite)

    def _pushes_reported(self, shard: int, arrived: Arrived) -> list[Order]:
        orders: list[Order] = []
        members, bit = self.members, 1 << shard
        lives, columns = arrived.incarnations, (arrived.sequences, arrived.finite)
        for worker, life, sequence, finite in zip(arrived.workers, lives, *columns, strict=True):
            member = members.get(worker)
            # Others belong to a life that is over, or are repeated.
            if member is not None and life == member.incarnation and sequence > member.sequence:
                orders += self._part_arrived(worker, member, sequence, bit, finite)
        return orders

    def _part_arrived(
        self, worker: int, member: WorkerState, sequence: int, part: int, finite: bool
    ) -> list[Order]:
        """Decide on a push once it is on all the shards that it needs."""
        if sequence != member.arriving:
            member.arriving, member.parts, member.finite = sequence, 0, True
        member.parts |= part
        member.finite = member.finite and finite
        needed = self.shards if self.policy.coordinated else 1
        if member.parts.bit_count() < needed or not member.parts & 1:
            return []
        member.sequence = sequence
        self._change(worker, "waiting")
        if member.push is not None and self.ledger.holds(worker, member.push.batch):
            self.ledger.arrive(member.push)
        return self._orders(self._decide(worker, member))

    def _decide(self, worker: int, member: WorkerState) -> list[Decision]:
        """Return the decisions on a worker's push."""
        if self.finished:
            return [Drop(worker, "the job is complete")]
        if not member.finite:
            self.refused += 1
            self.ledger.skip(worker)
            self.arrivals.under_way.pop(worker, None)
            return [Release(worker)]  # still computing, as far as the policy knows
        self.undecided.add(worker)
        return self.policy.push(worker)

    def _orders(self, decisions: list[Decision], *, at_once: bool = False) -> list[Order]:
        """Turn decisions and their consequences into orders; ``at_once``: no barrier waits."""
        orders: list[Order] = []
        released = self._add_orders(decisions, orders)
        if self.closing or self.next_policy is not None:
            released = self._at_barrier(orders, at_once)
        elif not released:
            released = self._add_orders(self._feed(), orders)
        self._let_go_on(released, orders)
        if self._is_stuck():
            self.next_policy = self.make_policy(self.policy.spec)
            self._let_go_on(self._at_barrier(orders, at_once), orders)
        if self.makes_rosters and not self.closing and self.next_policy is None:
            self._begin_roster(orders)
        if self.finished:
            self.next_policy = None
            self._end(orders)
        return orders

    def _let_go_on(self, released: list[int], orders: list[Order]) -> None:
        while released and not self.finished:
            released = self._add_orders(self._release(released, orders), orders)

    def _add_orders(self, decisions: list[Decision], orders: list[Order]) -> list[int]:
        """Add the orders for decisions; return the workers to release after them."""
        released: list[int] = []
        for decision in decisions:
            match decision:
                case Apply(worker):
                    if self._is_async:
                        self._note_arrival(decision)
                    elif self._most_local_steps:
                        raise ConfigError(
                            f"the policy {self.policy.spec} applies a result of local steps by "
                            "itself, as a gradient; expected Reduce, or at_arrival = True: correct "
                            "its class"
                        )
                    self.version += decision.local_steps or 1
                    self.applied += 1
                    self.ledger.count(worker)
                    self.undecided.discard(worker)
                    orders.append(decision)
                case Release(worker):
                    released.append(worker)
                case Reduce(workers):
                    decision.local_steps = self._steps_of_round(workers)
                    self.version += decision.local_steps or 1
                    self.applied += len(workers)
                    self.ledger.count_all()
                    self.undecided.difference_update(workers)
                    orders.append(decision)
                case Accumulate(worker):
                    self.applied += 1
                    self.undecided.discard(worker)
                    orders.append(decision)
                case Drop(worker):
                    self.dropped += 1
                    self.ledger.give_back(worker)
                    self.undecided.discard(worker)
                    orders.append(decision)
        return released

    def _extend(self, limit: int) -> None:
        """Begin the next pass, with all workers in one step, as when a policy begins."""
        if self.next_policy is None and self.is_pass_over and self.workers_by_state["starved"]:
            self.next_policy = self.make_policy(self.policy.spec)
        self.ledger.raise_limit(limit)

    def _is_stuck(self) -> bool:
        """Return whether a step at the end of a pass lacks gradients that will not come."""
        if self.workers_by_state["computing"] or not self.ledger.outstanding:
            return False
        return not self.ledger.may_lease and not self.finished

    def _at_barrier(self, orders: list[Order], at_once: bool) -> list[int]:
        """Hold all workers until none computes; then end, or begin the next policy with all."""
        if self.workers_by_state["computing"] and not at_once:
            return []
        if not self.finished:
            self._add_orders(self.policy.drain(), orders)
        if self.closing or self.next_policy is None:
            self.steps = self.version
            return []
        self.policy, following = self.next_policy, self.next_policy
        self.next_policy, self.arrivals = None, Arrivals()
        orders.append(Switch(following.spec))
        joined = self.workers_in("waiting", "starved", "spare")
        following.start(self.version, len(joined))
        released: list[int] = []
        for worker in joined:
            self._change(worker, "waiting")
            released += self._add_orders(following.join(worker), orders)
        return released

    def _release(self, workers: list[int], orders: list[Order]) -> list[Decision]:
        """Let workers go on with leased batches; return the policy's decisions for the rest.

        No worker waits for one without a batch: to the policy it has left until a batch comes back.
        """
        leased = self._top_up(workers)
        decisions: list[Decision] = []
        for worker in workers:
            if self._is_needed() and self.ledger.leases.get(worker):
                orders.append(self._answer(worker, tuple(leased[worker])))
                self._change(worker, "computing")
            else:
                self._change(worker, "spare" if self.ledger.leases.get(worker) else "starved")
                decisions += self.policy.leave(worker)
        return decisions + self._feed()

    def _feed(self) -> list[Decision]:
        """Join to the policy again the workers for which there is a batch now."""
        idle = self.workers_by_state
        if not (idle["spare"] or idle["starved"]) or not self._is_needed():
            return []
        fed = self.workers_in("spare", "starved") if self._may_lease() else self.workers_in("spare")
        decisions: list[Decision] = []
        for worker in fed:
            self._change(worker, "waiting")
            decisions += self.policy.join(worker)
        return decisions

    def _top_up(self, workers: list[int]) -> dict[int, list[int]]:
        """Lease batches in rounds, so that their numbers follow (step, worker) if all go on."""
        leased: dict[int, list[int]] = {worker: [] for worker in workers}
        most = {worker: self._local_steps(worker) or 1 + self.lookahead for worker in workers}
        for depth in range(max(most.values(), default=0)):
            for worker in workers:
                held = len(self.ledger.leases.get(worker, ()))
                if held <= depth < most[worker] and self._may_lease():
                    leased[worker].append(self.ledger.lease(worker))
        return leased

    def _answer(self, worker: int, batches: tuple[int, ...] = (), *, stop: bool = False) -> Order:
        """Return the order that answers a worker's push; or its pull, if it has pushed nothing."""
        member, steps = self.members[worker], self._local_steps(worker)
        if steps:
            steps = min(steps, len(self.ledger.leases.get(worker, ())))
        if self._is_async:
            self.arrivals.under_way[worker] = steps
        return Answer(
            worker=worker,
            incarnation=member.incarnation,
            sequence=member.sequence,
            batches=batches,
            stop=stop,
            local_steps=steps,
            sends_difference=self._is_async,
        )

    @property
    def _is_async(self) -> bool:
        """Whether a worker's result of local steps counts by itself."""
        return self.policy.at_arrival and self._most_local_steps > 0

    @property
    def _most_local_steps(self) -> int:
        """Number of steps that the policy lets a worker make by itself, at most; 0: none."""
        return min(self.policy.local_steps(self.version), self.policy.most_local_steps)

    def _local_steps(self, worker: int) -> int:
        """Return how many steps a worker makes by itself from this one on, at most; 0: none."""
        most = self._most_local_steps
        if self._is_async:
            most = self.arrivals.batches(worker, most)
        return most and max(1, min(most, self._room()))

    def _steps_of_round(self, workers: Iterable[int]) -> int:
        """Return how many steps a reduction is that ends a round; 0: it ends none."""
        if not self._most_local_steps:
            return 0
        return max(len(self.ledger.pending.get(worker, ())) for worker in workers)

    def _note_arrival(self, order: Apply) -> None:
        """Set how the result of a worker counts; each of its batches is a step."""
        steps = order.local_steps = len(self.ledger.pending.get(order.worker, ())) or 1
        order.among = len(self.members) - len(self.workers_by_state["joining"])
        order.cycle = self.arrivals.counted(order.worker, steps, order.among)

    def _room(self) -> int:
        """Return the number of steps up to the next evaluation, which no worker makes alone."""
        return self._up_to_evaluation() - sum(self.arrivals.under_way.values())

    def _up_to_evaluation(self) -> int:
        """Return the number of steps up to the end, or to the next evaluation."""
        every = self.evaluate_every
        end = (self.version // every + 1) * every if every else self.steps
        return min(end, self.steps) - self.version

    def _may_lease(self) -> bool:
        if not self.ledger.may_lease:
            return False
        if self._is_async:
            return self.ledger.outstanding < self._up_to_evaluation()
        if not self.policy.step_per_push:
            return True  # only the version ends the run; excess gradients are dropped
        return self.version + self.ledger.outstanding < self.steps

    def _is_needed(self) -> bool:
        """Return whether one more gradient would count.

        A former policy that averages several in a step may have leased too many batches.
        """
        if self._is_async:
            return self._room() > 0
        if not self.policy.step_per_push:
            return True
        return self.version + len(self.workers_by_state["computing"]) < self.steps

    def _end(self, orders: list[Order]) -> None:
        """Send a stop to all workers that do not compute."""
        abandoned = sorted(self.undecided)  # the run was given up
        self._add_orders([Drop(worker, "the job was given up") for worker in abandoned], orders)
        for worker in self.workers_in("waiting", "starved", "spare"):
            self._change(worker, "stopped")
            orders.append(self._answer(worker, stop=True))

    def _change(self, worker: int, state: Stage) -> None:
        member = self.members[worker]
        self.workers_by_state[member.state].remove(worker)
        self.workers_by_state[state].add(worker)
        member.state = state

    def workers_in(self, *states: Stage) -> list[int]:
        """Return the workers in any of these states, in order."""
        return sorted(worker for state in states for worker in self.workers_by_state[state])
