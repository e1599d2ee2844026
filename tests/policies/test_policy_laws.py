"""Laws that every policy keeps, whatever happens; a new policy joins by one row in SPECS."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.policies import (
    Accumulate,
    Apply,
    Decision,
    Drop,
    Policy,
    Reduce,
    Release,
    load_policy,
    make_policy,
)


class EveryPush(Policy):
    """The least that a policy of one's own says."""

    def push(self, worker: int) -> list[Decision]:
        return [Apply(worker), Release(worker)]


load_policy(f"{__name__}:EveryPush")

SPECS = [
    "hogwild",
    f"{__name__}:EveryPush",
    "bounded-staleness:0",
    "bounded-staleness:1",
    "bounded-staleness:3",
    "sync-replicas",
    "sync-replicas:aggregate=1",
    "sync-replicas:aggregate=2",
    "sync-replicas:aggregate=3",
    "sync-replicas:aggregate=7",
    "sync-replicas:aggregate=2,tokens=0",
    "sync-replicas:aggregate=2,tokens=3",
    "sync-replicas:aggregate=6,tokens=3",
    "local-steps:2",
    "local-steps:2,async",
    "local-steps:2,async,bound=0",
    "local-steps:2,after=3,async,bound=1",
]
WORKERS = 4

every_policy = pytest.mark.parametrize("spec", SPECS)

events = st.tuples(
    st.integers(0, WORKERS - 1), st.sampled_from(["go", "go", "go", "go", "go", "leave"])
)
# A plain list would rarely be longer than ten events.
schedules = st.integers(0, 80).flatmap(lambda n: st.lists(events, min_size=n, max_size=n))


class World:
    """Workers and one shard's memory around a policy; every wrong decision is an error."""

    def __init__(self, policy: Policy, version: int = 0) -> None:
        self.policy = policy
        self.version = version
        self.live: set[int] = set()
        self.computing: dict[int, int] = {}  # worker -> version it was released at
        self.slots: dict[int, int] = {}  # worker -> version of its gradient, not yet settled
        self.sum: list[int] = []  # versions of the accumulated gradients
        self.pushed = self.counted = self.dropped = 0
        self.has_released = self.has_left = False
        self.trace: list[str] = []
        policy.start(version, WORKERS)

    def expect(self, law: bool, broken: str) -> None:
        if not law:
            raise AssertionError("\n".join([*self.trace, f"{self.policy.spec}: {broken}"]))

    def play(self, schedule: Iterable[tuple[int, str]]) -> None:
        for worker, wish in schedule:
            if wish == "leave" and worker in self.live:
                self.leave(worker)
            elif wish == "go" and worker not in self.live:
                self.join(worker)
            elif wish == "go" and worker in self.computing:
                self.push(worker)

    def join(self, worker: int) -> None:
        self.live.add(worker)
        self.take_in(f"join {worker}", self.policy.join(worker))

    def leave(self, worker: int) -> None:
        self.live.discard(worker)
        self.computing.pop(worker, None)
        self.has_left = True
        self.take_in(f"leave {worker}", self.policy.leave(worker))

    def push(self, worker: int) -> None:
        self.expect(worker not in self.slots, f"the push of {worker} overwrites an unsettled one")
        self.slots[worker] = self.computing.pop(worker)
        self.pushed += 1
        self.take_in(f"push {worker}", self.policy.push(worker))

    def drain(self) -> None:
        for worker in sorted(self.computing):
            self.leave(worker)
        self.take_in("drain", self.policy.drain())

    def take_in(self, event: str, decisions: list[Decision]) -> None:
        self.trace.append(f"{event} -> {decisions}")
        for decision in decisions:
            self.carry_out(decision)
        held = [held.worker for held in self.policy.held()]
        waiting = self.live - self.computing.keys()
        self.expect(sorted(held) == sorted(waiting), f"held are {held}, waiting are {waiting}")
        for reason in self.policy.held():
            self.expect(reason.worker not in reason.by, f"{reason.worker} waits for itself")

    def carry_out(self, decision: Decision) -> None:
        match decision:
            case Apply(worker):
                self.settle(worker)
                self.end_update(1)
            case Accumulate(worker):
                self.sum.append(self.settle(worker))
            case Reduce(workers):
                versions = [*self.sum, *map(self.settle, workers)]
                self.sum.clear()
                stale = [version for version in versions if version != self.version]
                self.expect(not stale, f"step {self.version} averages gradients of {stale}")
                self.end_update(len(versions))
            case Drop(worker):
                self.settle(worker)
                self.dropped += 1
            case Release(worker):
                self.has_released = True
                self.expect(worker in self.live, f"{worker} is released but not live")
                self.expect(worker not in self.computing, f"{worker} is released twice")
                self.computing[worker] = self.version

    def settle(self, worker: int) -> int:
        self.expect(worker in self.slots, f"there is no unsettled gradient of {worker}")
        return self.slots.pop(worker)

    def end_update(self, gradients: int) -> None:
        self.expect(gradients > 0, "an update without a gradient")
        self.expect(
            not self.policy.step_per_push or gradients == 1, "a step of more than one gradient"
        )
        self.version += 1
        self.counted += gradients


@every_policy
@settings(max_examples=40)
@given(schedule=schedules)
def test_every_push_counts_once_or_is_dropped(spec: str, schedule: list[tuple[int, str]]) -> None:
    world = World(make_policy(spec), version=10)
    world.play(schedule)
    world.drain()
    world.expect(not world.slots and not world.sum, f"{world.slots} and {world.sum} are left")
    world.expect(world.pushed == world.counted + world.dropped, "a push was lost or doubled")
    world.expect(not world.policy.drain(), "a second drain finds something")


@every_policy
@settings(max_examples=40)
@given(schedule=schedules)
def test_some_worker_computes_while_one_is_live(spec: str, schedule: list[tuple[int, str]]) -> None:
    world = World(make_policy(spec))
    for event in schedule:
        if "tokens" in spec and event[1] == "leave":
            continue  # a token that is gone with its worker may hang the others
        world.play([event])
        is_sync = "sync-replicas" in spec or spec == "local-steps:2" or "after" in spec
        waits_for_first = is_sync and len(world.live) < WORKERS
        begun = world.has_released and "tokens" not in spec
        if world.live and (begun or not waits_for_first):
            world.expect(bool(world.computing), "nobody computes")
            for held in world.policy.held():
                world.expect(
                    bool(held.by) and set(held.by) <= world.computing.keys(),
                    f"{held} names others than {sorted(world.computing)}, who compute",
                )


@every_policy
@settings(max_examples=20)
@given(before=schedules, after=schedules)
def test_policy_that_starts_again_forgets_everything(
    spec: str, before: list[tuple[int, str]], after: list[tuple[int, str]]
) -> None:
    used, fresh = make_policy(spec), make_policy(spec)
    World(used).play(before)
    again, first = World(used, version=5), World(fresh, version=5)
    again.play(after)
    first.play(after)
    assert again.trace == first.trace


@pytest.mark.parametrize("bound", range(4))
@given(schedule=schedules)
def test_worker_proceeds_iff_the_slowest_is_within_the_bound(
    bound: int, schedule: list[tuple[int, str]]
) -> None:
    """As stale synchronous parallel clocks are published: iff min(clocks) >= its clock - bound."""
    world = World(make_policy(f"bounded-staleness:{bound}"))
    clocks: dict[int, int] = {}
    slowest = 0
    for worker, wish in schedule:
        pushed = world.pushed
        world.play([(worker, wish)])
        if worker in world.live:
            clocks[worker] = clocks.get(worker, slowest) + world.pushed - pushed
        else:
            clocks.pop(worker, None)
        least = min(clocks.values(), default=slowest)
        world.expect(slowest <= least, "the slowest clock went back")
        slowest = least
        within = {worker for worker, clock in clocks.items() if slowest >= clock - bound}
        world.expect(world.computing.keys() == within, f"{clocks}, and {world.computing} compute")
        world.expect(max(clocks.values(), default=0) <= slowest + bound + 1, f"{clocks}")
