"""Orders of the coordinator, event by event."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordination.plays import coordinator, playing
from zmqtrain.coordination import waiting
from zmqtrain.coordination.events import Event, Joined, PullArrived, PushArrived, PushesReported
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.policies import Held
from zmqtrain.protocol.orders import Answer, Apply
from zmqtrain.wire.messages import Arrived


def arrival(worker: int, sequence: int, shard: int, batch: int = 0) -> Event:
    """Return that a push lies ready on a shard."""
    if shard == 0:
        return PushArrived(worker, sequence, batch)
    return PushesReported(shard, Arrived((worker,), (1,), (sequence,), (True,)))


PLAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "worker is let in by its pull and goes on by its pushes": ("hogwild", {}, """
        join 0 1   -> -
        pull 0     -> answer 0 with 0
        join 1 1   -> -
        pull 1     -> answer 1 with 1
        push 1 1 1 -> apply 1, answer 1 with 2
        push 1 2 2 -> apply 1, answer 1 with 3
        push 0 1 0 -> apply 0, answer 0 with 4
        held       -> -
        leave 0    -> -
        leave 0    -> -
    """),
    "repeated report changes nothing": ("bounded-staleness:0", {"shards": 2}, """
        pull 0          -> -
        join 0 1        -> -
        pull 0          -> answer 0 with 0
        pull 0          -> -
        push 0 1 0      -> -
        push 0 1 0      -> -
        push 0 1 0 at 1 -> apply 0, answer 0 with 1
        push 0 1 0 at 1 -> -
        push 0 1 0      -> -
        pull 0          -> -
    """),
    "new life ends the one before": ("sync-replicas", {"joined": 2, "lookahead": 1}, """
        pull 0     -> -
        pull 1     -> answer 0 with 0 2, answer 1 with 1 3
        push 0 1 0 -> -
        join 1 2   -> reduce 0, answer 0 with 1
        pull 1     -> -
        held       -> 1 waits for 0
        push 0 2 2 -> reduce 0, answer 0 with 4, answer 1 with 3 5
    """),
    "other push counts once it is at the lead shard": ("hogwild", {"shards": 3}, """
        join 0 1        -> -
        pull 0          -> answer 0 with 0
        push 0 1 0 at 2 -> -
        push 0 1 0      -> apply 0, answer 0 with 1
    """),
    "unfinished arrival is not counted by anothers step":
    ("sync-replicas:aggregate=1", {"joined": 2, "shards": 2}, """
        pull 0          -> -
        pull 1          -> answer 0 with 0, answer 1 with 1
        push 1 1 1      -> -
        push 0 1 0      -> -
        push 0 1 0 at 1 -> reduce 0, answer 0 with 2
        push 1 1 1 at 1 -> drop 1 stale, answer 1 with 1
        open            -> 1, 2
    """),
    "batch of an unfinished arrival goes to another":
    ("sync-replicas", {"joined": 2, "shards": 2}, """
        pull 0          -> -
        pull 1          -> answer 0 with 0, answer 1 with 1
        push 0 1 0      -> -
        leave 0         -> -
        push 1 1 1      -> -
        push 1 1 1 at 1 -> reduce 1, answer 1 with 0
    """),
    "accumulated batch of a worker that leaves stays counted":
    ("sync-replicas:aggregate=3", {"shards": 2, "workers": 1}, """
        join 0 1        -> -
        pull 0          -> answer 0 with 0
        push 0 1 0      -> -
        push 0 1 0 at 1 -> accumulate 0, answer 0 with 1
        push 0 2 1 at 1 -> -
        leave 0         -> -
        join 0 2        -> -
        pull 0          -> answer 0 with 1
        push 0 1 1      -> -
        push 0 1 1 at 1 -> accumulate 0, answer 0 with 2
        push 0 2 2      -> -
        push 0 2 2 at 1 -> reduce 0, answer 0 with 3
        open            -> 3
    """),
    "worker without a batch can leave": ("bounded-staleness:0", {"joined": 2, "steps": 1}, """
        pull 0     -> answer 0 with 0
        pull 1     -> -
        leave 1    -> -
        push 0 1 0 -> apply 0, answer 0 stop
    """),
    "every worker is stopped after the last step":
    ("sync-replicas:aggregate=2", {"joined": 3, "workers": 3, "steps": 1}, """
        pull 0     -> -
        pull 1     -> -
        pull 2     -> answer 0 with 0, answer 1 with 1, answer 2 with 2
        push 0 1 0 -> -
        push 1 1 1 -> reduce 0 1, answer 0 stop, answer 1 stop
        push 2 1 2 -> drop 2 the job is complete, answer 2 stop
        join 1 2   -> -
        pull 1     -> answer 1 stop
        leave 1    -> -
        held       -> -
        .version   -> 1
        open       -> 2
    """),
    # A shard to which nothing is said of a push it has would apply it by itself.
    "job that is given up drops the pushes that were kept for a step":
    ("sync-replicas:aggregate=2", {"joined": 2, "workers": 2}, """
        pull 0     -> -
        pull 1     -> answer 0 with 0, answer 1 with 1
        push 0 1 0 -> -
        give-up    -> drop 0 the job was given up, answer 0 stop
        push 1 1 1 -> drop 1 the job is complete, answer 1 stop
        open       -> 0, 1
    """),
    "job that is complete when it starts stops everyone":
    ("sync-replicas", {"steps": 5, "version": 5}, """
        join 0 1  -> -
        pull 0    -> answer 0 stop
        .finished -> True
    """),
    "non finite gradient is skipped with its batch":
    ("sync-replicas", {"shards": 2, "workers": 1}, """
        join 0 1            -> -
        pull 0              -> answer 0 with 0
        push 0 1 0          -> -
        push 0 1 0 at 1 bad -> answer 0 with 1
        push 0 2 1          -> -
        push 0 2 1 at 1     -> reduce 0, answer 0 with 2
        .refused            -> 1
        .version            -> 1
        open                -> 2
    """),
    "non finite gradient does not move a clock": ("bounded-staleness:0", {}, """
        join 0 1       -> -
        pull 0         -> answer 0 with 0
        join 1 1       -> -
        pull 1         -> answer 1 with 1
        push 0 1 0 bad -> answer 0 with 2
        push 1 1 1     -> apply 1
        held           -> 1 waits for 0
        push 0 2 2     -> apply 0, answer 0 with 3, answer 1 with 4
    """),
    "resumed run leases what was open first":
    ("sync-replicas", {"version": 7, "ledger": Ledger(next_batch=20, returned=[17, 12])}, """
        join 0 1    -> -
        join 1 1    -> -
        pull 1      -> -
        pull 0      -> answer 0 with 12, answer 1 with 17
        push 0 1 12 -> -
        push 1 1 17 -> reduce 0 1, answer 0 with 20, answer 1 with 21
        .version    -> 8
    """),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "fields", "script"), PLAYS.values(), ids=PLAYS)
def test_orders_are_those_of_the_play(policy: str, fields: dict[str, Any], script: str) -> None:
    playing(coordinator(policy, **fields))(script)


def test_release_answers_one_push_of_one_life() -> None:
    run = coordinator("hogwild")
    run.handle(Joined(0, 3))
    assert run.handle(PullArrived(0)) == [Answer(0, 3, 0, (0,))]
    orders = run.handle(PushArrived(0, 1, 0))
    assert orders[-1] == Answer(0, 3, 1, (1,))
    run.handle(Joined(0, 4))
    assert run.handle(PullArrived(0)) == [Answer(0, 4, 0, (1,))]


@pytest.mark.parametrize("last", [0, 1, 2])
def test_coordinated_push_counts_once_it_is_at_every_shard(last: int) -> None:
    run = coordinator("bounded-staleness:1", shards=3)
    run.handle(Joined(0, 1))
    run.handle(PullArrived(0))
    for shard in {0, 1, 2} - {last}:
        assert not run.handle(arrival(0, 1, shard))
        assert run.ledger.open_batches() == (0,)
    orders = run.handle(arrival(0, 1, last))
    assert list(map(type, orders)) == [Apply, Answer]


def test_part_of_an_earlier_life_does_not_count_for_the_new_one() -> None:
    run = coordinator("hogwild:whole", workers=1, shards=2)
    for life in (1, 2):
        run.handle(Joined(0, life))
        run.handle(PullArrived(0))
    assert run.handle(PushArrived(0, 1, 0)) == []
    assert run.handle(PushesReported(1, Arrived((0,), (1,), (1,), (True,)))) == []
    orders = run.handle(PushesReported(1, Arrived((0,), (2,), (1,), (True,))))
    assert list(map(type, orders)) == [Apply, Answer]


@settings(max_examples=30)
@given(
    workers=st.integers(1, 5), shards=st.integers(1, 2), lookahead=st.integers(0, 3), data=st.data()
)
def test_batch_numbers_follow_step_and_worker_when_all_are_averaged(
    workers: int, shards: int, lookahead: int, data: st.DataObject
) -> None:
    run = coordinator("sync-replicas", shards=shards, workers=workers, steps=4, lookahead=lookahead)
    leases: dict[int, list[int]] = {worker: [] for worker in range(workers)}
    for worker in range(workers):
        run.handle(Joined(worker, 1))
    for step in range(4):
        for worker in data.draw(st.permutations(range(workers))):
            batch = leases[worker].pop(0) if step else -1
            assert not step or batch == (step - 1) * workers + worker
            arrivals = [arrival(worker, step, shard, batch) for shard in range(shards)]
            for event in arrivals if step else [PullArrived(worker)]:
                for order in run.handle(event):
                    if isinstance(order, Answer):
                        leases[order.worker] += order.batches


@pytest.mark.parametrize("spec", ["hogwild", "bounded-staleness:1"])
def test_no_more_batches_are_leased_than_steps_are_left(spec: str) -> None:
    run = coordinator(spec, joined=2, steps=3, lookahead=1)
    playing(run)("""
        pull 0     -> answer 0 with 0 1
        pull 1     -> answer 1 with 2
        push 0 1 0 -> apply 0, answer 0
        push 0 2 1 -> apply 0
        held       -> 0 waits for 1
        push 1 1 2 -> apply 1, answer 0 stop, answer 1 stop
        held       -> -
    """)
    assert run.finished
    assert run.ledger.open_batches() == ()


@pytest.mark.parametrize("spec", ["hogwild", "bounded-staleness:0", "bounded-staleness:2"])
def test_worker_that_leaves_hands_its_batches_to_one_that_had_none(spec: str) -> None:
    run = coordinator(spec, joined=2, steps=2, lookahead=1)
    playing(run)("""
        pull 0     -> answer 0 with 0 1
        pull 1     -> -
        held       -> 1 waits for 0
        leave 0    -> answer 1 with 0 1
        join 0 2   -> -
        pull 0     -> -
        push 1 1 0 -> apply 1, answer 1
        push 1 2 1 -> apply 1, answer 0 stop, answer 1 stop
    """)


@pytest.mark.parametrize(
    ("workers", "is_alive"), [((0,), True), ((0, 1), True), ((1,), False), ((), False)]
)
def test_workers_are_waited_for_if_any_of_them_is_there(
    workers: tuple[int, ...], is_alive: bool
) -> None:
    run = coordinator("sync-replicas")
    run.handle(Joined(0, 1))
    assert waiting.is_alive(run, workers) is is_alive


def test_worker_without_a_batch_is_held_with_the_reason() -> None:
    run = coordinator("hogwild", steps=1)
    for worker in (0, 1):
        run.handle(Joined(worker, 1))
        run.handle(PullArrived(worker))
    assert list(waiting.held(run)) == [
        Held(1, "every step up to the last is being computed already", (0,))
    ]
