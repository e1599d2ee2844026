"""Laws of the coordinator under any schedule of arrivals, deaths, new lives and policy switches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.coordination import waiting
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.events import Event as CoordinatorEvent
from zmqtrain.coordination.events import Joined, Left, PullArrived, PushArrived, PushesReported
from zmqtrain.policies import Decision, Release, make_policy
from zmqtrain.protocol.orders import Accumulate, Answer, Apply, Drop, Order, Reduce, Switch
from zmqtrain.wire.control import SwitchPolicy
from zmqtrain.wire.messages import Arrived

SPECS = [
    "hogwild",
    "bounded-staleness:0",
    "bounded-staleness:2",
    "sync-replicas",
    "sync-replicas:aggregate=1",
    "sync-replicas:aggregate=2",
    "sync-replicas:aggregate=5",
]
WISHES = ["go"] * 10 + ["leave", "rejoin", "nan", "switch"]

Event = tuple[int, str, int]
"""Worker, what it wishes, and a number that settles what the wish leaves open."""


class Watched:
    """A policy that minds how it is used."""

    def __init__(self, world: World, spec: str) -> None:
        self._world = world
        self._policy = make_policy(spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def start(self, version: int, workers: int) -> None:
        self._live: set[int] = set()
        self._computing: set[int] = set()
        self._policy.start(version, workers)

    def join(self, worker: int) -> list[Decision]:
        self._world.expect(worker not in self._live, f"the policy has {worker} already")
        self._live.add(worker)
        return self._taken(self._policy.join(worker))

    def leave(self, worker: int) -> list[Decision]:
        self._world.expect(worker in self._live, f"the policy is left by {worker}, whom it lacks")
        self._live.remove(worker)
        self._computing.discard(worker)
        return self._taken(self._policy.leave(worker))

    def push(self, worker: int) -> list[Decision]:
        self._world.expect(worker in self._computing, f"the policy did not release {worker}")
        self._computing.remove(worker)
        return self._taken(self._policy.push(worker))

    def _taken(self, decisions: list[Decision]) -> list[Decision]:
        self._computing |= {d.worker for d in decisions if isinstance(d, Release)}
        return decisions


@dataclass
class Gradient:
    """A push's gradient in the leader's memory."""

    batch: int
    version: int  # that it was computed on
    policy: int  # number of the policy that it was computed under


@dataclass
class Life:
    """A worker between its join and its leave."""

    incarnation: int
    sequence: int = 0  # of its last message, 0 is the pull
    leases: list[int] = field(default_factory=list)
    gradient: Gradient | None = None  # being computed, or on its way
    bad_shard: int = -1  # where the gradient is not finite
    reached: set[int] = field(default_factory=set)  # shards that have the message
    state: str = "sent"  # then waiting, once it is decided on; computing or stopped, once released


class World:
    """Workers and shards around a coordinator; every wrong order is an error."""

    def __init__(self, spec: str, shards: int, workers: int, steps: int, lookahead: int) -> None:
        self.trace = [f"{spec}, {shards=}, {workers=}, {steps=}, {lookahead=}"]
        self.shards, self.workers, self.steps = shards, workers, steps
        self.lives: dict[int, Life] = {}
        self.incarnations = count(1)
        self.version = self.policies = 0
        self.slots: dict[int, Gradient] = {}  # pushes that were decided on but are not settled
        self.sum: list[Gradient] = []
        self.used: list[int] = []  # batches, counted or not to be learned from
        self.switching = ""
        self.coordinated = make_policy(spec).coordinated
        self.coordinator = Coordinator(
            Watched(self, spec), shards=shards, workers=workers, steps=steps, lookahead=lookahead
        )
        self.coordinator.make_policy = partial(Watched, self)  # type: ignore[misc]

    def expect(self, law: bool, broken: str) -> None:
        if not law:
            raise AssertionError("\n".join([*self.trace, f"BROKEN: {broken}"]))

    @property
    def finished(self) -> bool:
        return self.version == self.steps

    @property
    def over(self) -> bool:
        return self.finished and all(life.state == "stopped" for life in self.lives.values())

    # What may happen

    def play(self, schedule: list[Event]) -> None:
        for number, wish, choice in schedule:
            worker = number % self.workers
            life = self.lives.get(worker)
            if wish == "switch":
                self.switch(SPECS[choice % len(SPECS)])
            elif life is None or wish == "rejoin":
                self.join(worker)
            elif wish == "leave":
                self.leave(worker)
            elif life.state == "computing":
                self.push(worker, life, choice % self.shards if wish == "nan" else -1)
            elif life.state in ("sent", "waiting"):
                self.reach(worker, life, choice % self.shards)

    def join(self, worker: int) -> None:
        self.forget(worker)
        life = self.lives[worker] = Life(next(self.incarnations))
        self.obey(f"join {worker}", self.coordinator.handle(Joined(worker, life.incarnation)))

    def leave(self, worker: int) -> None:
        self.forget(worker)
        self.obey(f"leave {worker}", self.coordinator.handle(Left(worker)))

    def forget(self, worker: int) -> None:
        self.lives.pop(worker, None)

    def push(self, worker: int, life: Life, bad_shard: int) -> None:
        life.sequence += 1
        life.state, life.bad_shard = "sent", bad_shard
        life.reached = set()
        life.leases.pop(0)
        self.trace.append(f"{worker} sends push {life.sequence}")

    def reach(self, worker: int, life: Life, shard: int) -> None:
        """The message arrives at a shard, or its arrival is reported once more."""
        is_new = shard not in life.reached
        life.reached.add(shard)
        if shard and not (life.sequence and self.coordinated):
            return  # such a shard decides for itself and reports nothing
        batch = life.gradient.batch if life.gradient and shard == 0 else -1
        if batch >= 0:
            self.expect(self.coordinator.ledger.holds(worker, batch), f"no lease on {batch}")
        if life.state == "sent" and self.is_complete(life):
            life.state = "waiting"
            self.decided(worker, life)
        finite = shard != life.bad_shard
        arrived: CoordinatorEvent = PullArrived(worker)
        if shard:
            part = Arrived((worker,), (life.incarnation,), (life.sequence,), (finite,))
            arrived = PushesReported(shard, part)
        elif life.sequence:
            arrived = PushArrived(worker, life.sequence, batch, finite=finite)
        again = "" if is_new else " again"
        orders = self.coordinator.handle(arrived)
        self.obey(f"{worker}'s {life.sequence} is at shard {shard}{again}", orders)

    def is_complete(self, life: Life) -> bool:
        everywhere = self.coordinated and life.sequence
        return 0 in life.reached and (not everywhere or len(life.reached) == self.shards)

    def decided(self, worker: int, life: Life) -> None:
        if life.gradient is None:
            return
        bad = life.bad_shard == 0 or (self.coordinated and life.bad_shard > 0)
        if bad and not self.finished:
            self.used.append(life.gradient.batch)
        else:
            self.expect(worker not in self.slots, f"{worker}'s push overwrites one not settled")
            self.slots[worker] = life.gradient
        life.gradient = None

    def switch(self, spec: str) -> None:
        if self.finished:
            return
        self.switching = spec
        self.obey(f"switch to {spec}", self.coordinator.handle(SwitchPolicy(spec)))

    # What follows from it

    def obey(self, event: str, orders: list[Order]) -> None:
        self.trace.append(f"{event} -> {', '.join(map(str, orders))}")
        for order in orders:
            self.carry_out(order)
        if self.finished:
            self.switching = ""
        self.check_books()
        self.check_held()

    def carry_out(self, order: Order) -> None:
        match order:
            case Apply(worker):
                self.count([self.settle(worker)])
            case Accumulate(worker):
                self.sum.append(self.settle(worker))
            case Reduce(workers):
                gradients = [*self.sum, *map(self.settle, workers)]
                self.sum.clear()
                for gradient in gradients:
                    self.expect(
                        gradient.version == self.version, f"step {self.version}: {gradient}"
                    )
                self.count(gradients)
            case Drop(worker):
                self.settle(worker)
                self.expect(self.coordinated, "a push is dropped that other shards have applied")
            case Switch(policy):
                self.switched(policy)
            case Answer():
                self.answered(order)

    def switched(self, policy: str) -> None:
        busy = [
            worker
            for worker, life in self.lives.items()
            if life.state == "computing" or (life.state == "sent" and life.sequence)
        ]
        self.expect(not busy, f"the policy changes while {busy} compute")
        self.expect(policy == self.switching, f"the policy is {policy}")
        self.switching = ""
        self.policies += 1
        self.coordinated = make_policy(policy).coordinated

    def answered(self, order: Answer) -> None:
        worker = order.worker
        life = self.lives.get(worker)
        if life is None:
            return self.expect(False, f"{worker} is released but not live")
        self.expect(life.state == "waiting", f"{worker} is released but {life.state}")
        self.expect(
            (order.incarnation, order.sequence) == (life.incarnation, life.sequence),
            f"the release answers {order.incarnation}, {order.sequence}, not {life}",
        )
        self.expect(order.stop == self.finished, f"{worker} is told stop={order.stop}")
        self.expect(self.finished or not self.switching, f"{worker} is released into a switch")
        life.state = "stopped" if order.stop else "computing"
        life.leases += order.batches
        if not order.stop:
            self.expect(bool(life.leases), f"{worker} is released without a batch")
            life.gradient = Gradient(life.leases[0], self.version, self.policies)

    def settle(self, worker: int) -> Gradient:
        self.expect(worker in self.slots, f"there is no unsettled push of {worker}")
        return self.slots.pop(worker)

    def count(self, gradients: list[Gradient]) -> None:
        self.expect(bool(gradients), "an update without a gradient")
        for gradient in gradients:
            self.expect(gradient.policy == self.policies, f"{gradient} is of a former policy")
        self.version += 1
        self.used += [gradient.batch for gradient in gradients]
        self.expect(self.version <= self.steps, "more updates than steps")

    def check_books(self) -> None:
        coordinator, ledger = self.coordinator, self.coordinator.ledger
        self.expect(coordinator.version == self.version, f"counts version {coordinator.version}")
        self.expect(len(self.used) == len(set(self.used)), f"a batch twice in {self.used}")
        still_open = sorted(set(range(ledger.next_batch)) - set(self.used))
        self.expect(
            ledger.open_batches() == tuple(still_open),
            f"open are {still_open}, the ledger says {ledger.open_batches()}",
        )

    def check_held(self) -> None:
        expected = sorted(w for w, life in self.lives.items() if life.state == "waiting")
        held = list(waiting.held(self.coordinator))
        names = sorted(reason.worker for reason in held)
        self.expect(names == expected, f"held are {names}, waiting are {expected}")
        for reason in held:
            known = bool(reason.by) or "token" in reason.reason  # who is yet to join has no name
            self.expect(known and reason.worker not in reason.by, f"{reason}")

    # The end

    def run_to_the_end(self) -> None:
        """Have every live worker go on until it is told to stop."""
        for _ in range(40 * self.steps + 40):
            if self.over and self.lives:
                return
            before = len(self.trace)
            for worker, life in list(self.lives.items()):
                self.go_on(worker, life)
            if len(self.trace) == before:
                self.reinforce()
        self.expect(False, "the run does not end")

    def go_on(self, worker: int, life: Life) -> None:
        if life.state == "computing":
            self.push(worker, life, bad_shard=-1)
        for shard in range(self.shards):
            if life.state == "sent" and shard not in life.reached:
                self.reach(worker, life, shard)

    def reinforce(self) -> None:
        """Join those who are missing, where nothing can go on without them."""
        reasons = [held.reason for held in waiting.held(self.coordinator)]
        first_step = any("workers have joined" in reason for reason in reasons)
        self.expect(first_step or not self.lives, f"nothing goes on: {reasons}")
        for worker in range(self.workers):
            if worker not in self.lives:
                self.join(worker)


events = st.tuples(st.integers(0, 3), st.sampled_from(WISHES), st.integers(0, 20))
# A plain list would rarely be longer than ten events.
schedules = st.integers(0, 100).flatmap(lambda n: st.lists(events, min_size=n, max_size=n))
worlds = st.builds(
    World,
    spec=st.sampled_from(SPECS),
    shards=st.integers(1, 3),
    workers=st.integers(1, 4),
    steps=st.integers(1, 12),
    lookahead=st.integers(0, 2),
)


@settings(max_examples=200)
@given(world=worlds, schedule=schedules)
def test_run_ends_at_its_last_step_under_any_schedule(world: World, schedule: list[Event]) -> None:
    world.play(schedule)
    world.run_to_the_end()
    assert world.version == world.steps
    assert world.lives


@settings(max_examples=50)
@given(
    tokens=st.integers(0, 5),
    shards=st.integers(1, 2),
    aggregate=st.integers(1, 5),
    schedule=schedules,
)
def test_run_with_tokens_ends_without_deaths(
    tokens: int, shards: int, aggregate: int, schedule: list[Event]
) -> None:
    spec = f"sync-replicas:aggregate={aggregate},tokens={tokens}"
    world = World(spec, shards=shards, workers=3, steps=6, lookahead=1)
    for worker in range(3):
        world.join(worker)
    world.play([event for event in schedule if event[1] in ("go", "nan")])
    world.run_to_the_end()
