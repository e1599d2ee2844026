"""Bounded staleness against the published predicate."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.policies import Apply, Decision, Release
from zmqtrain.policies.bounded_staleness import BoundedStaleness

WORKERS = 5


@dataclass
class Reference:
    """Stale synchronous parallel clocks: a worker goes on iff min(clocks) >= its clock - bound."""

    bound: int
    clocks: dict[int, int] = field(default_factory=dict)
    slowest: int = 0

    def join(self, worker: int) -> None:
        self.clocks[worker] = self.slowest

    def leave(self, worker: int) -> None:
        del self.clocks[worker]

    def push(self, worker: int) -> None:
        self.clocks[worker] += 1

    def advance(self) -> None:
        slowest = min(self.clocks.values(), default=self.slowest)
        assert slowest >= self.slowest, "the slowest clock went back"
        self.slowest = slowest

    def may_proceed(self) -> set[int]:
        return {w for w, clock in self.clocks.items() if self.slowest >= clock - self.bound}


events = st.tuples(
    st.integers(0, WORKERS - 1), st.sampled_from(["go", "go", "go", "go", "go", "leave"])
)
# A plain list would rarely be longer than ten events.
schedules = st.integers(0, 80).flatmap(lambda n: st.lists(events, min_size=n, max_size=n))


@settings(max_examples=100)
@given(bound=st.integers(0, 3), schedule=schedules)
def test_worker_proceeds_iff_the_slowest_is_within_the_bound(
    bound: int, schedule: list[tuple[int, str]]
) -> None:
    policy, reference = BoundedStaleness(bound), Reference(bound)
    policy.start(0, WORKERS)
    computing: set[int] = set()
    trace: list[str] = []
    for worker, wish in schedule:
        event = _possible(worker, wish, reference.clocks, computing)
        if event is None:
            continue
        decisions: list[Decision] = getattr(policy, event)(worker)
        trace.append(f"{event} {worker} -> {decisions}")
        getattr(reference, event)(worker)
        reference.advance()
        computing.discard(worker)
        computing |= {decision.worker for decision in decisions if isinstance(decision, Release)}
        history = "\n".join(trace)
        assert decisions.count(Apply(worker)) == (event == "push"), history
        assert policy.clocks == reference.clocks, history
        assert computing == reference.may_proceed(), history
        assert {held.worker for held in policy.held()} == set(reference.clocks) - computing, history
        clocks = reference.clocks.values()
        assert not clocks or max(clocks) - min(clocks) <= bound + 1, history


def _possible(worker: int, wish: str, clocks: dict[int, int], computing: set[int]) -> str | None:
    if worker not in clocks:
        return "join" if wish == "go" else None
    if wish == "leave":
        return "leave"
    return "push" if worker in computing else None
