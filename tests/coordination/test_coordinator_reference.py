"""The coordinator against one that looks at every worker whenever it decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.events import (
    Event,
    GivenUp,
    Joined,
    Left,
    PullArrived,
    PushArrived,
    PushesReported,
)
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.policies import Accumulate, Apply, Drop, Policy, Reduce, Release, make_policy
from zmqtrain.policies.bounded_staleness import BoundedStaleness
from zmqtrain.policies.sync_replicas import SyncReplicas
from zmqtrain.wire.messages import Close, Order, ReadyPush, SwitchPolicy


class PlainBoundedStaleness(BoundedStaleness):
    def join(self, worker: int) -> list[Any]:
        self.clocks[worker] = self.slowest
        return [Release(worker)]

    def leave(self, worker: int) -> list[Any]:
        del self.clocks[worker]
        self.waiting.discard(worker)
        return self._advance()

    def push(self, worker: int) -> list[Any]:
        self.clocks[worker] += 1
        self.waiting.add(worker)
        return [Apply(worker), *self._advance()]

    def _advance(self) -> list[Any]:
        if self.clocks:
            self.slowest = min(self.clocks.values())
        limit = self.slowest + self.staleness_bound
        free = sorted(worker for worker in self.waiting if self.clocks[worker] <= limit)
        self.waiting.difference_update(free)
        return [Release(worker) for worker in free]


class PlainSyncReplicas(SyncReplicas):
    def _fill(self) -> list[Any]:
        decisions: list[Any] = []
        for worker in sorted(self.waiting, key=lambda w: (w in self.ready, w)):
            if self.hands < self._needed():
                if worker in self.ready:
                    self.ready.discard(worker)
                    decisions.append(Accumulate(worker))
                decisions += self._release(worker)
        return decisions


def plain_policy(spec: str) -> Policy:
    policy = make_policy(spec)
    if isinstance(policy, BoundedStaleness):
        return PlainBoundedStaleness(policy.staleness_bound)
    return PlainSyncReplicas(policy.aggregate) if isinstance(policy, SyncReplicas) else policy


class PlainLedger(Ledger):
    """Counts what is outstanding whenever it is asked."""

    @property
    def outstanding(self) -> int:  # type: ignore[override]
        return sum(map(len, self.leases.values())) + sum(map(len, self.pending.values()))

    @outstanding.setter
    def outstanding(self, _: int) -> None: ...


@dataclass
class PlainMember:
    incarnation: int
    sequence: int = -1
    arriving: int = -1
    shards: set[int] = field(default_factory=set)
    batch: int = -1
    examples: int = 0
    finite: bool = True
    undecided: bool = False
    computing: bool = False
    starved: bool = False
    stopped: bool = False


class PlainCoordinator:
    """The same rules, with a flag for everything in each worker's entry."""

    def __init__(self, spec: str, shards: int, workers: int, steps: int, lookahead: int) -> None:
        self.policy, self.following = plain_policy(spec), ""
        self.shards, self.steps, self.lookahead = shards, steps, lookahead
        self.ledger, self.members = PlainLedger(), dict[int, PlainMember]()
        self.version, self.closing = 0, False
        self.orders: list[Order] = []
        self.policy.start(0, workers)

    @property
    def finished(self) -> bool:
        return self.version >= self.steps

    def handle(self, event: Event) -> list[Order]:
        self.orders = []
        match event:
            case PushArrived(worker, sequence, batch, examples, finite):
                if worker in self.members and sequence > self.members[worker].sequence:
                    self.members[worker].batch = batch
                    self.members[worker].examples = examples
                self.part_arrived(worker, sequence, 0, finite)
            case PushesReported(shard, pushes):
                for push in pushes:
                    self.part_arrived(push.worker, push.sequence, shard, push.finite)
            case PullArrived(worker):
                member = self.members.get(worker)
                if member is None or member.sequence >= 0:
                    return []
                member.sequence = 0
                self.follow([] if self.finished else self.policy.join(worker))
            case Joined(worker, incarnation):
                self.leave(worker)
                self.members[worker] = PlainMember(incarnation)
            case Left(worker):
                self.leave(worker)
            case _:
                match event:
                    case SwitchPolicy(spec):
                        self.following = spec
                    case Close():
                        self.closing = True
                    case GivenUp():
                        self.steps = self.version
                self.follow([], at_once=event == Close(at_once=True))
        return self.orders

    def part_arrived(self, worker: int, sequence: int, shard: int, finite: bool) -> None:
        member = self.members.get(worker)
        if member is None or sequence <= member.sequence:
            return
        if sequence != member.arriving:
            member.arriving, member.shards, member.finite = sequence, set(), True
        member.shards.add(shard)
        member.finite = member.finite and finite
        needed = self.shards if self.policy.coordinated else 1
        if len(member.shards) < needed or 0 not in member.shards:
            return
        member.sequence, member.computing = sequence, False
        if self.ledger.holds(worker, member.batch):
            self.ledger.arrive(worker, member.batch, member.examples)
        self.follow(self.decide(worker, member))

    def leave(self, worker: int) -> None:
        member = self.members.pop(worker, None)
        if member is None:
            return
        self.ledger.leave(worker)
        self.orders.append(Order("leave", (worker,)))
        is_in = member.sequence >= 0 and not member.starved and not self.finished
        self.follow(self.policy.leave(worker) if is_in else [])

    def decide(self, worker: int, member: PlainMember) -> list[Any]:
        if self.finished:
            return [Drop(worker, "the job is complete")]
        if not member.finite:
            self.ledger.skip(worker)
            return [Release(worker)]
        member.undecided = True
        return self.policy.push(worker)

    def follow(self, decisions: list[Any], at_once: bool = False) -> None:
        released = self.carry_out(decisions)
        if self.closing or self.following:
            released = self.at_barrier(at_once)
        elif not released:
            released = self.carry_out(self.feed())
        while released and not self.finished:
            released = self.carry_out(self.release(released))
        if self.finished:
            self.following = ""
            self.end()

    def carry_out(self, decisions: list[Any]) -> list[int]:
        released = []
        for decision in decisions:
            settled: tuple[int, ...] = ()
            match decision:
                case Apply(worker):
                    self.version += 1
                    self.ledger.count(worker)
                    settled = (worker,)
                    self.orders.append(Order("apply", settled))
                case Reduce(settled):
                    self.version += 1
                    self.ledger.count_all()
                    self.orders.append(Order("reduce", settled))
                case Accumulate(worker):
                    settled = (worker,)
                    self.orders.append(Order("accumulate", settled))
                case Drop(worker, reason):
                    self.ledger.give_back(worker)
                    settled = (worker,)
                    self.orders.append(Order("drop", settled, reason))
                case Release(worker):
                    released.append(worker)
            for worker in settled:
                if worker in self.members:
                    self.members[worker].undecided = False
        return released

    def at_barrier(self, at_once: bool) -> list[int]:
        if not at_once and any(member.computing for member in self.members.values()):
            return []
        if not self.finished:
            self.carry_out(self.policy.drain())
        if self.closing or not self.following:
            self.steps = self.version
            return []
        self.orders.append(Order("switch", (), self.following))
        self.policy, self.following = plain_policy(self.following), ""
        joined = sorted(w for w, member in self.members.items() if member.sequence >= 0)
        self.policy.start(self.version, len(joined))
        released = []
        for worker in joined:
            self.members[worker].starved = False
            released += self.carry_out(self.policy.join(worker))
        return released

    def release(self, workers: list[int]) -> list[Any]:
        leased = dict[int, list[int]]((worker, []) for worker in workers)
        for depth in range(1 + self.lookahead):
            for worker in workers:
                if len(self.ledger.leases.get(worker, ())) <= depth and self.may_lease():
                    leased[worker].append(self.ledger.lease(worker))
        decisions = []
        for worker in workers:
            member = self.members[worker]
            member.computing = self.is_needed() and bool(self.ledger.leases.get(worker))
            member.starved = not member.computing
            if member.starved:
                decisions += self.policy.leave(worker)
            else:
                self.orders.append(self.release_order(worker, tuple(leased[worker])))
        return decisions + self.feed()

    def feed(self) -> list[Any]:
        decisions = []
        for worker, member in sorted(self.members.items()):
            has_batch = self.ledger.leases.get(worker) or self.may_lease()
            if member.starved and has_batch and self.is_needed():
                member.starved = False
                decisions += self.policy.join(worker)
        return decisions

    def end(self) -> None:
        members = sorted(self.members.items())
        self.carry_out([Drop(w, "the job was given up") for w, m in members if m.undecided])
        for worker, member in members:
            if member.sequence >= 0 and not member.computing and not member.stopped:
                member.stopped = True
                self.orders.append(self.release_order(worker, (), stop=True))

    def release_order(self, worker: int, batches: tuple[int, ...], stop: bool = False) -> Order:
        member = self.members[worker]
        kind: Any = "release" if member.sequence else "admit"
        return Order(kind, (worker,), "", member.incarnation, member.sequence, batches, stop)

    def may_lease(self) -> bool:
        is_open = self.version + self.ledger.outstanding < self.steps
        return is_open or not self.policy.step_per_push

    def is_needed(self) -> bool:
        computing = sum(member.computing for member in self.members.values())
        return self.version + computing < self.steps or not self.policy.step_per_push


SPECS = (
    "hogwild",
    "hogwild:whole",
    "bounded-staleness:0",
    "bounded-staleness:1",
    "bounded-staleness:4",
    "sync-replicas",
    "sync-replicas:aggregate=2",
    "sync-replicas:aggregate=7",
    "sync-replicas:aggregate=2,tokens=3",
)
WORKERS = 6
WISHES = ["push"] * 12 + ["bad", "leave", "join", "join", "switch"]
RARE = {0: Close(), 1: GivenUp(), 2: Close(at_once=True)}

wishes = st.tuples(st.sampled_from(WISHES), st.integers(0, WORKERS - 1), st.integers(0, 99))
# A plain list would rarely be longer than ten.
schedules = st.integers(0, 150).flatmap(lambda n: st.lists(wishes, min_size=n, max_size=n))


def events_of(
    coordinator: Coordinator, wish: str, worker: int, choice: int, shards: int
) -> list[Event]:
    """Return what happens if the wish can be granted now."""
    member = coordinator.members.get(worker)
    if wish == "switch":
        return [RARE.get(choice, SwitchPolicy(SPECS[choice % len(SPECS)]))]
    if member is None or wish == "join":
        return [Joined(worker, choice), PullArrived(worker)]
    if wish == "leave":
        return [Left(worker)]
    if member.state != "computing":
        return []
    batch, sequence = coordinator.ledger.leases[worker][0], member.sequence + 1
    finite = wish != "bad"
    reported = ReadyPush(worker, member.incarnation, sequence, True)
    pushes: list[Event] = [PushArrived(worker, sequence, batch, 10, finite)]
    pushes += [PushesReported(shard, (reported,)) for shard in range(1, shards)]
    return pushes[choice % shards :] + pushes[: choice % shards]


@settings(deadline=None, max_examples=400)
@given(
    spec=st.sampled_from(SPECS),
    shards=st.integers(1, 3),
    workers=st.integers(1, WORKERS),
    steps=st.integers(1, 40),
    lookahead=st.integers(0, 2),
    schedule=schedules,
)
def test_coordinator_decides_as_one_that_looks_at_every_worker(
    spec: str,
    shards: int,
    workers: int,
    steps: int,
    lookahead: int,
    schedule: list[tuple[str, int, int]],
) -> None:
    coordinator = Coordinator(
        make_policy(spec), shards=shards, workers=workers, steps=steps, lookahead=lookahead
    )
    plain = PlainCoordinator(spec, shards, workers, steps, lookahead)
    for wish, worker, choice in schedule:
        for event in events_of(coordinator, wish, worker, choice, shards):
            assert coordinator.handle(event) == plain.handle(event), event
            ledger = coordinator.ledger
            assert ledger.open_batches() == plain.ledger.open_batches()
            assert ledger.outstanding == plain.ledger.outstanding
