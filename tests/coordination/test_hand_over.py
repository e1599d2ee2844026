"""Hand-over by the survivors of a generation: their last orders, and the parts each one writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.model import counting_job
from zmqtrain.config.cluster import Cluster
from zmqtrain.coordination.hand_over import OrderLog, agreed, lacking, left_of
from zmqtrain.errors import CheckpointError
from zmqtrain.planning.plan import plan_for
from zmqtrain.protocol.checkpoint import LastOrders, LedgerState, Saved
from zmqtrain.protocol.orders import Apply
from zmqtrain.store.layout import RowSlice, Slice, Variable
from zmqtrain.store.placement import place, with_copies


def saved(step: int = 0) -> Saved:
    return Saved(step, "sync-replicas", LedgerState(0, (), 0))


def orders(first: int, count: int, generation: int = 1) -> LastOrders:
    each = (Apply(number) for number in range(first, first + count))
    return LastOrders(generation, first, tuple(each), saved())


def test_orders_are_known_as_far_as_their_outcome_is() -> None:
    log = OrderLog(workers=2)
    assert log.last is None
    log.take(7, 1, orders(1, 3).orders, None)
    assert log.last is None
    log.take(7, 4, orders(4, 1).orders, saved(step=4))
    log.take(7, 5, orders(5, 2).orders, None)
    assert log.last == LastOrders(7, 1, orders(1, 4).orders, saved(step=4))
    log.begin()
    assert log.last is None


def test_log_has_more_orders_than_another_ps_may_lack_and_no_more() -> None:
    log = OrderLog(workers=30)
    for number in range(1, 1001):
        log.take(1, number, orders(number, 1).orders, saved())
    assert log.last is not None
    assert 2 * 31 < len(log.last.orders) < 200
    assert log.last.end == 1000
    assert log.last.orders[-1].workers == (1000,)


def test_log_begins_anew_after_a_restart_with_the_order_that_comes_next() -> None:
    log = OrderLog(workers=2)
    log.take(3, 41, orders(41, 2).orders, saved())
    assert log.last == orders(41, 2, generation=3)


@pytest.mark.parametrize(("done", "first"), [(3, 4), (4, 5), (8, None)])
def test_ps_carries_out_what_it_lacks(done: int, first: int | None) -> None:
    lacked = lacking(orders(4, 5), 1, done)
    assert [number for number, _ in lacked] == ([] if first is None else [*range(first, 9)])
    assert all(order.workers == (number,) for number, order in lacked)


@pytest.mark.parametrize(("generation", "done"), [(1, 2), (1, 9), (2, 5), (0, 5)])
def test_ps_that_lacks_more_or_is_further_or_of_another_generation_hands_nothing_on(
    generation: int, done: int
) -> None:
    with pytest.raises(CheckpointError, match=r"expected one of 3 to 8 of generation 1"):
        lacking(orders(4, 5), generation, done)


def name_of(part: Slice | RowSlice) -> tuple[Any, ...]:
    return (part.variable, part.start) if isinstance(part, Slice) else (part.owner,)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sets(st.integers(0, 5)),
    st.booleans(),
)
def test_those_that_are_left_write_everything_once_unless_all_copies_of_a_part_are_lost(
    rows: list[int], shards: int, copies: int, left: set[int], has_tables: bool
) -> None:
    variables = [Variable(f"v{number}", (count, 3)) for number, count in enumerate(rows)]
    placed = place(variables, shards, "contiguous", 12)
    layouts = with_copies(placed, min(copies, shards), has_tables=has_tables)
    there = {shard for shard in left if shard < shards}
    found = left_of(layouts, there)
    held = {name_of(part) for at in there for part in layouts[at].parts}
    everything = {name_of(part) for layout in layouts for part in layout.parts}
    assert (found is not None) == (held == everything)
    if found is not None:
        written = [name_of(part) for each in found.values() for part in each.parts if not part.copy]
        assert sorted(written, key=str) == sorted(everything, key=str)
        assert [each.shard for each in found.values()] == list(range(len(there)))
        offsets = {at: [cut.offset for cut in each.slices] for at, each in found.items()}
        assert offsets == {at: [cut.offset for cut in layouts[at].slices] for at in there}


CLUSTER = Cluster((), 4, worker_addresses=("a:1", "b:1", "c:1", "d:1"))
PLAN = plan_for(counting_job(4, frozenset(), copies=2), CLUSTER)


@pytest.mark.parametrize(
    ("known", "found"),
    [
        ({at: orders(1, 4 + at) for at in range(4)}, 3),
        ({0: orders(4, 3), 1: orders(1, 5), 2: orders(5, 1)}, 0),
        ({0: orders(1, 5), 2: replace(orders(9, 9), saved=None)}, 0),
        ({0: orders(90, 9), 1: orders(1, 1, generation=2), 3: orders(1, 2, generation=2)}, 3),
    ],
)
def test_those_that_are_left_agree_on_the_last_orders_of_the_last_generation(
    known: dict[int, LastOrders], found: int
) -> None:
    last, outcome, parts = agreed(PLAN, known)
    assert last is known[found]
    assert outcome is last.saved
    left = [at for at, each in known.items() if each.generation == last.generation]
    assert parts == left_of(PLAN.layouts, left)


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({}, "no remaining ps knows the last orders"),
        ({1: replace(orders(1, 5), saved=None)}, "no remaining ps knows the last orders"),
        ({2: orders(1, 5), 3: orders(1, 5)}, "with all of their copies, on worker 0, worker 1$"),
        (  # ps 1 has not begun the last generation
            {0: orders(1, 1, generation=2), 1: orders(1, 5), 3: orders(1, 1, generation=2)},
            "with all of their copies, on worker 1, worker 2$",
        ),
    ],
)
def test_less_than_one_version_of_everything_is_not_taken(
    known: dict[int, LastOrders], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        agreed(PLAN, known)
