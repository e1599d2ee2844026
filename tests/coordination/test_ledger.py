"""Every batch is counted exactly once, or still open."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.coordination.events import PushArrived, Stepped
from zmqtrain.coordination.ledger import Ledger


def test_ledger_of_a_checkpoint_goes_on_with_its_open_batches() -> None:
    ledger = Ledger(next_batch=9, returned=[7, 2, 4])
    assert [ledger.lease(0) for _ in range(5)] == [2, 4, 7, 9, 10]


operations = st.tuples(
    st.sampled_from(["lease", "lease", "arrive", "count", "give_back", "skip", "leave", "all"]),
    st.integers(0, 2),
)
schedules = st.integers(0, 60).flatmap(lambda n: st.lists(operations, min_size=n, max_size=n))


def test_pass_sums_only_the_measures_of_all_its_batches() -> None:
    ledger = Ledger(limit=3)
    batches = [ledger.lease(0) for _ in range(3)]
    for batch, sums in zip(batches, ({"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 8.0}), strict=False):
        ledger.arrive(PushArrived(0, 1, batch, 10, loss=0.5, sums=sums, weight=4.0))
    ledger.give_back(0)
    ledger.count(0)
    assert (ledger.pass_examples, ledger.pass_sums) == (10, {"a": 1.0, "b": 2.0})
    assert (ledger.examples, ledger.pass_weight, ledger.mean_loss) == (10, 4.0, 0.5)
    ledger.advance([0], Stepped(1, 10, 18.0, over=False, sums={"b": 16.0}, weight=12.0))
    assert (ledger.pass_sums, ledger.mean_loss) == ({"b": 18.0}, 20 / 16)
    ledger.raise_limit(9)
    assert ledger.pass_sums == {}


@settings(max_examples=100)
@given(before=schedules, after=schedules)
def test_every_batch_is_counted_once_or_open(
    before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    ledger, done = Ledger(), set[int]()
    _play(ledger, done, before)
    restored = Ledger(ledger.next_batch, list(ledger.open_batches()))
    assert restored.open_batches() == ledger.open_batches()
    _play(restored, done, after)


def _play(ledger: Ledger, done: set[int], schedule: list[tuple[str, int]]) -> None:
    """Carry out what is possible; ``done`` takes the batches that were counted or skipped."""
    for operation, worker in schedule:
        held = ledger.leases.get(worker, [])
        pending = ledger.pending.get(worker, [])
        if operation == "lease":
            still_open = ledger.open_batches()
            free = [b for b in still_open if b not in _in_use(ledger)]
            assert ledger.lease(worker) == min(free, default=len(done) + len(still_open))
        elif operation == "arrive" and held:
            ledger.arrive(PushArrived(worker, 1, held[0]))
        elif operation == "count":
            done.update(pending)
            ledger.count(worker)
        elif operation == "give_back" and pending:
            ledger.give_back(worker)
        elif operation == "skip" and pending:
            done.add(pending[-1])
            ledger.skip(worker)
        elif operation == "leave":
            ledger.leave(worker)
        elif operation == "all":
            done.update(batch for batches in ledger.pending.values() for batch in batches)
            ledger.count_all()
        still_open = ledger.open_batches()
        assert sorted([*done, *still_open]) == list(range(ledger.next_batch))
        assert ledger.outstanding == len(_in_use(ledger))


def _in_use(ledger: Ledger) -> list[int]:
    batches = [*ledger.leases.values(), *ledger.pending.values()]
    return [batch for worker in batches for batch in worker]
