"""A roster makes the steps that the coordinator would have decided one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordination import plays
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.events import Joined, Left, PullArrived, PushArrived, Stepped
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.state import pack, unpack
from zmqtrain.protocol.orders import Answer, Order, Roster, Switch
from zmqtrain.wire.control import Close, Extend

EXAMPLES = 10


def coordinator(workers: int, *, policy: str = "sync-replicas", **fields: Any) -> Coordinator:
    given = {"makes_rosters": True, "steps": 50, "lookahead": 1, "workers": workers}
    return plays.coordinator(policy, **given | fields)


class Job:
    """A coordinator, and workers that compute what they hold in order, with their sequences."""

    def __init__(self, made: Coordinator) -> None:
        self.made = made
        self.sequences: dict[int, int] = {}
        self.orders: list[Order] = []

    def join(self, worker: int, *, on_board: bool = True) -> None:
        self.sequences[worker] = 0
        self._handle(Joined(worker, 1))
        self._handle(PullArrived(worker, on_board))

    def leave(self, worker: int) -> None:
        self._handle(Left(worker))

    def push(self, worker: int) -> None:
        self.sequences[worker] += 1
        batch = self.made.ledger.leases[worker][0]
        loss = loss_of(batch)
        sums = {"losses": EXAMPLES * loss}
        self._handle(PushArrived(worker, self.sequences[worker], batch, EXAMPLES, True, loss, sums))

    def step(self) -> None:
        for worker in sorted(self.made.workers_by_state["computing"]):
            self.push(worker)

    def end_roster(self, steps: int) -> list[int]:
        """The roster makes so many steps; return the batches that they were of."""
        roster = self.made.roster
        assert roster is not None
        held = {worker: list(self.made.ledger.leases[worker]) for worker in roster.workers}
        counted, following = [], roster.next_batch
        for _ in range(steps):
            for worker in roster.workers:
                held[worker].append(following)
                following += 1
                counted.append(held[worker].pop(0))
        losses = EXAMPLES * sum(map(loss_of, counted))
        sums = {"losses": losses}
        self._handle(Stepped(steps, EXAMPLES * len(counted), losses, over=True, sums=sums))
        return counted

    def _handle(self, event: Any) -> None:
        self.orders = self.made.handle(unpack(pack(event)))

    @property
    def rosters(self) -> list[Roster]:
        return [order for order in self.orders if isinstance(order, Roster)]


def loss_of(batch: int) -> float:
    return batch % 7 / 8


def state(made: Coordinator) -> dict[str, Any]:
    ledger = made.ledger
    return {
        "version": made.version,
        "applied": made.applied,
        "policy": vars(made.policy),
        "states": made.workers_by_state,
        "leases": ledger.leases,
        "next": ledger.next_batch,
        "open": ledger.open_batches(),
        "outstanding": ledger.outstanding,
        "examples": (ledger.examples, ledger.pass_examples),
        "loss": pytest.approx(ledger.pass_loss),
        "sums": {name: pytest.approx(value) for name, value in ledger.pass_sums.items()},
        "finished": made.finished,
    }


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    lookahead=st.integers(0, 3),
    limit=st.none() | st.integers(5, 150),
    aggregate=st.sampled_from(["", ":aggregate=2"]),
)
def test_rosters_leave_the_coordinator_as_steps_by_messages_do(
    seed: int, lookahead: int, limit: int | None, aggregate: str
) -> None:
    chosen = random.Random(seed)
    fields = {"lookahead": lookahead, "policy": f"sync-replicas{aggregate}"}
    one, other = (
        Job(coordinator(2, makes_rosters=makes, ledger=Ledger(limit=limit), **fields))
        for makes in (True, False)
    )
    for worker in (0, 1):
        for job in (one, other):
            job.join(worker)
    for turn in range(40):
        if one.made.roster is not None:
            steps = chosen.randint(0, min(one.made.roster.steps, 12))
            one.end_roster(steps)
            for _ in range(steps):
                other.step()
        elif chosen.random() < 0.2:
            worker = chosen.choice([0, 1, 2, 3])
            action = Job.leave if worker in one.made.members else Job.join
            for job in (one, other):
                action(job, worker)
        elif computing := sorted(one.made.workers_by_state["computing"]):
            worker = chosen.choice(computing)
            for job in (one, other):
                job.push(worker)
        assert state(one.made) == state(other.made), f"turn {turn}"


def test_roster_begins_with_the_order_that_comes_before_all_are_released() -> None:
    job = Job(coordinator(2))
    job.join(1)
    assert not job.orders
    job.join(0)
    begins = Roster((0, 1), steps=49, next_batch=4)
    assert job.orders == [begins, Answer(0, 1, 0, (0, 2)), Answer(1, 1, 0, (1, 3))]


def test_repeated_report_of_a_roster_counts_once() -> None:
    job = Job(coordinator(1))
    job.join(0)
    for over in (False, False, True, True):
        job.made.handle(Stepped(3, 30, 1.5, over=over))
    assert job.made.version == 3
    assert job.made.applied == 3
    assert (job.made.ledger.examples, job.made.ledger.pass_loss) == (30, 1.5)
    assert job.made.ledger.leases == {0: [3, 4]}


def test_last_step_and_the_last_batches_of_a_pass_are_decided_one_by_one() -> None:
    last = Job(coordinator(2, steps=2))
    last.join(0)
    last.join(1)
    assert last.rosters[0].steps == 1
    at_end = Job(coordinator(2, steps=1))
    at_end.join(0)
    at_end.join(1)
    assert not at_end.rosters
    pass_end = Job(coordinator(2, ledger=Ledger(limit=9)))
    pass_end.join(0)
    pass_end.join(1)
    assert pass_end.rosters[0].steps == 2


def test_step_that_is_evaluated_is_decided_by_itself() -> None:
    """So that each shard can be copied before the next one."""
    job = Job(coordinator(2, evaluate_every=10, steps=25))
    job.join(0)
    job.join(1)
    for version, steps in ((0, 9), (10, 9), (20, 4)):
        assert job.made.version == version
        assert job.rosters[0].steps == steps
        job.end_roster(steps)
        job.step()
    assert job.made.finished


def test_every_step_is_decided_by_itself_if_each_is_evaluated() -> None:
    job = Job(coordinator(2, evaluate_every=1))
    job.join(0)
    job.join(1)
    for _ in range(3):
        assert not job.rosters
        job.step()


@pytest.mark.parametrize("policy", ["hogwild", "bounded-staleness:1", "sync-replicas:aggregate=1"])
def test_other_policies_have_no_rosters(policy: str) -> None:
    job = Job(coordinator(2, policy=policy))
    job.join(0)
    job.join(1)
    job.step()
    assert not job.rosters


def test_worker_that_is_not_on_the_board_keeps_all_from_it() -> None:
    job = Job(coordinator(2))
    job.join(0)
    job.join(1, on_board=False)
    job.step()
    assert not job.rosters
    job.leave(1)
    for _ in range(2):  # the batches that came back go first
        assert not job.rosters
        job.step()
    assert job.rosters[0].workers == (0,)


def test_batches_that_came_back_are_counted_before_a_roster_begins() -> None:
    job = Job(coordinator(3))
    for worker in range(3):
        job.join(worker)
    job.end_roster(0)
    job.leave(1)
    assert job.made.ledger.returned == [1, 4]
    job.step()
    assert job.rosters[0].next_batch == 6
    assert job.made.ledger.leases == {0: [3, 1], 2: [5, 4]}


def test_run_that_ends_has_no_rosters() -> None:
    job = Job(coordinator(2))
    job.join(0)
    job.join(1)
    job.end_roster(2)
    job.made.handle(Close())
    job.step()
    assert not job.rosters
    assert job.made.finished


def test_next_pass_begins_with_a_roster() -> None:
    job = Job(coordinator(2, ledger=Ledger(limit=4)))
    job.join(0)
    job.join(1)
    assert not job.rosters
    job.step()
    job.step()
    assert job.made.is_pass_over
    orders = job.made.handle(Extend(40))
    assert list(map(type, orders)) == [Switch, Roster, Answer, Answer]
