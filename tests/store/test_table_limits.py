"""Rows of a table: admitted after a number of gradients, forgotten after a number of updates."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.with_tables import Job, push, rows, table
from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.models.tables import Table, shards_of
from zmqtrain.optim import SGD, Adagrad, Update
from zmqtrain.protocol.orders import Accumulate, Apply, Rate, Reduce
from zmqtrain.store.changes import UPDATE, Change, Contribution
from zmqtrain.store.shard import Shard


def train(shard: Shard, *ids: int, workers: int = 1) -> None:
    """Make an update of these rows, by the mean of some workers' gradients."""
    assert shard.tables is not None
    variable = shard.tables.memory.layout.tables[0].variable
    for worker in range(workers):
        push(shard, worker, [rows(variable, 1, ids)] if ids else [])
    shard.carry_out(Reduce(tuple(range(workers))))


def trained(shard: Shard) -> list[int]:
    """Return the ids that have rows of their own."""
    assert shard.tables is not None
    (found,) = shard.tables.trained()
    assert shard.tables.status()["t"].trained == len(found.ids)
    return [int(id_) for id_ in found.ids]


def begin(**options: Any) -> Shard:
    return Job([table("t", **options)], [Update(SGD(0.1))]).begin()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("admit_after", [0, 1, 3])
def test_row_is_trained_once_enough_updates_had_a_gradient_of_it(
    admit_after: int, workers: int
) -> None:
    shard = begin(admit_after=admit_after)
    for number in range(6):
        train(shard, 7, *([8] if number % 2 else []), workers=workers)
        often = {7: number + 1, 8: (number + 1) // 2}
        assert trained(shard) == [id_ for id_, count in often.items() if count > admit_after]


def test_forgotten_row_is_admitted_anew() -> None:
    shard = begin(admit_after=1, max_rows=16)
    for id_ in range(17):
        train(shard, id_)
        train(shard, id_)
    assert 0 not in trained(shard)
    train(shard, 0)
    assert 0 not in trained(shard)
    train(shard, 0)
    assert 0 in trained(shard)


@pytest.mark.parametrize(
    "limit", [{"max_rows": 8}, {"forget_after": 1}, {"max_rows": 8, "admit_after": 1}], ids=str
)
def test_memory_of_forgotten_rows_is_used_again_in_a_table_of_few_ids(
    limit: dict[str, Any],
) -> None:
    shard, random = begin(rows=25, **limit), np.random.default_rng(0)
    for _ in range(60):
        train(shard, *random.choice(25, 12, replace=False).tolist())
    train(shard, *range(25))
    train(shard, *range(25))
    assert len(trained(shard)) == (8 if "max_rows" in limit else 25)


def test_gradient_before_admission_changes_nothing() -> None:
    shard = begin(admit_after=1)
    assert shard.tables is not None
    ids, variable = np.array([7]), table("t")
    train(shard, 7)
    np.testing.assert_array_equal(shard.tables.rows(0, ids), variable.initial_rows(ids))
    train(shard, 7)
    step = np.float32(0.1) * rows(variable, 1, [7]).rows
    np.testing.assert_array_equal(shard.tables.rows(0, ids), variable.initial_rows(ids) - step)


LIMITS: dict[str, dict[str, Any]] = {
    "none": {},
    "rows are forgotten": {"forget_after": 2},
    "rows are admitted, and forgotten": {"admit_after": 1, "forget_after": 3, "max_rows": 16},
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@settings(max_examples=12)
@given(
    pushes=st.lists(
        st.lists(st.lists(st.integers(0, 30), max_size=8, unique=True), min_size=1, max_size=3),
        min_size=2,
        max_size=14,
    )
)
def test_reading_rows_before_they_are_trained_changes_nothing(limits: Any, pushes: Any) -> None:
    variable = table("t", **limits)
    job = Job([variable], [Update(Adagrad(0.1))])
    read, unread = job.begin(), job.begin()
    assert read.tables is not None
    steps = [[rows(variable, n, ids) for n, ids in enumerate(each)] for each in pushes]
    for parts, following in pairwise([*steps, []]):
        for shard in (read, unread):
            for worker, part in enumerate(parts):
                push(shard, worker, [part])
        if following:  # others may be trained, and forgotten, before these are
            read.tables.rows(0, following[-1].ids)
        for shard in (read, unread):
            shard.carry_out(Reduce(tuple(range(len(parts)))))
        assert job.contents(read) == job.contents(unread)


def test_row_that_no_update_trains_is_forgotten() -> None:
    shard, ids = begin(forget_after=8), np.array([1, 2])
    assert shard.tables is not None
    train(shard, 1, 2)
    for _ in range(8):
        train(shard, 2)
    assert trained(shard) == [1, 2]
    train(shard, 2)  # of every second, whether rows are forgotten is decided: here, in the tenth
    assert trained(shard) == [2]
    initial = table("t").initial_rows(ids)
    assert ((shard.tables.rows(0, ids) == initial).all(axis=1) == [True, False]).all()
    before = shard.tables.status()["t"].nbytes
    train(shard, 3)  # in the memory of the forgotten one
    assert trained(shard) == [2, 3]
    assert shard.tables.status()["t"].nbytes == before


def test_candidate_that_no_update_counts_is_forgotten() -> None:
    shard = begin(forget_after=4, admit_after=1)
    train(shard, 1)
    for _ in range(4):
        train(shard)
    train(shard, 1)
    assert trained(shard) == []
    train(shard, 1)
    assert trained(shard) == [1]


def test_rows_trained_last_are_kept() -> None:
    shard = begin(max_rows=32)
    train(shard, *range(30))
    train(shard, 0, 1, 40, 41)
    assert len(trained(shard)) == 32
    train(shard, 50)  # one too many: it keeps 15 of 16, and of those trained at once the high ids
    assert trained(shard) == [0, 1, *range(5, 30), 40, 41, 50]


def limited(count: int, copies: int) -> list[Shard]:
    """Return shards with at most 8 rows of each owner, after updates of many rows."""
    shards = Job([table("t", max_rows=8 * count)], [Update(SGD(0.1))]).shards(count, copies)
    for shard in shards:
        shard.initialize(np.zeros(shard.layout.size, np.float32))
        assert shard.tables is not None
        for step in range(60):
            ids = np.random.default_rng(step).integers(-30, 30, step % 5)
            owners = shards_of(ids, count)
            train(shard, *ids[shard.tables.place.holds(owners)].tolist())
    return shards


def test_copies_keep_of_each_owner_what_the_owner_keeps() -> None:
    count = 4
    alone, copied = limited(count, 1), limited(count, 2)
    held = [np.array(trained(shard)) for shard in copied]
    for owner in range(count):
        expected = trained(alone[owner])
        assert 0 < len(expected) <= 8
        for holder in (owner, (owner + 1) % count):
            is_own = shards_of(held[holder], count) == owner
            assert held[holder][is_own].tolist() == expected


def test_rows_are_forgotten_whoever_has_inserted_those_before() -> None:
    shard = begin(max_rows=8)
    assert shard.tables is not None
    train(shard, *range(6))
    other = shard.tables.beside(0, range(1), 1)
    other.begin_own()
    for step in range(1, 4):  # as a member of a board does
        push(shard, 0, [rows(table("t"), 1, [10 + step])])
        change = Change(UPDATE, (Contribution(0, 0, 0, 4.0),), 4.0, 4.0, step)
        other.begin(change)
        other.update(change)
    train(shard, 99)
    assert trained(shard) == [2, 3, 4, 5, 11, 12, 13, 99]


WRONG = {
    "admit_after": [-1, 2.0, None, True, 1 << 16],
    "forget_after": [0, -3, 1.5],
    "max_rows": [0, "10"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, each in WRONG.items() for v in each])
def test_impossible_limit_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"Table: {name} is .*; expected a whole number"):
        Table(**{name: value})


def test_replaced_rate_is_that_of_tables_with_the_job_s_rule() -> None:
    tables = [table("t"), table("own", 1)]
    job = Job(tables, [Update(SGD(0.1)), Update(Adagrad(0.1))], Update(SGD(0.1)))
    shard = job.begin()
    assert shard.tables is not None
    shard.carry_out(Rate(0.0))
    parts = [rows(each, 1) for each in tables]
    push(shard, 0, parts)
    shard.carry_out(Apply(0))
    for each, part in zip(tables, parts, strict=True):
        stays = shard.tables.rows(each.number, part.ids) == each.initial_rows(part.ids)
        assert stays.all() == (each.name == "t")


def test_push_without_rows_counts_as_an_update() -> None:
    shard = begin()
    train(shard)
    push(shard, 0, [])
    shard.carry_out(Accumulate(0))
    train(shard)
    assert (shard.version, trained(shard)) == (2, [])


def test_status_of_a_table_counts_what_updates_did_to_its_rows() -> None:
    shard = begin(admit_after=1, max_rows=16)
    assert shard.tables is not None
    for number in range(40):
        train(shard, 7, number, workers=2)
        train(shard, number)
    train(shard, 98, 99)
    status = shard.tables.status()["t"]
    assert status.max_rows == 16
    assert status.updated == 2 * 40 + 40 - 1 + 2  # once 7 is both ids
    assert status.trained + status.forgotten > 39
    assert status.trained <= 16
    assert status.waiting == 2
    assert status.is_full


def test_table_that_has_room_is_not_full() -> None:
    shard = begin(max_rows=16)
    train(shard, 1, 2, 3)
    assert not shard.table_status()["t"].is_full


@settings(max_examples=60)
@given(
    limits=st.sampled_from([{}, {"max_rows": 16}, {"forget_after": 2, "admit_after": 1}]),
    updates=st.lists(st.lists(st.integers(0, 40), unique=True, max_size=12), max_size=10),
    read_after=st.lists(st.booleans(), min_size=10, max_size=10),
    before=st.integers(0, 6),
)
def test_kept_rows_are_those_of_their_version_whatever_is_trained_and_forgotten_later(
    limits: dict[str, int], updates: list[list[int]], read_after: list[bool], before: int
) -> None:
    shard, every = begin(**limits), np.arange(-1, 45)
    assert shard.tables is not None
    for number in range(before):
        train(shard, *range(number, 5 * number, 2))
    kept, expected = shard.keep(average=False), shard.tables.rows(0, every)
    assert kept.rows is not None
    for ids, is_read in zip(updates, read_after, strict=False):
        train(shard, *ids)
        if is_read:
            np.testing.assert_array_equal(kept.rows.read(0, every), expected)
            np.testing.assert_array_equal(kept.rows.read(0, every[::3]), expected[::3])
    np.testing.assert_array_equal(kept.rows.read(0, every), expected)
    assert kept.version == before


def test_two_versions_are_kept_beside_each_other_and_let_go_one_by_one() -> None:
    shard, ids = begin(), np.arange(4)
    assert shard.tables is not None
    found, versions = [], []
    for _ in range(2):
        train(shard, 1, 3)
        versions.append(shard.keep(average=False).rows)
        found.append(shard.tables.rows(0, ids))
    train(shard, 1, 2)
    for number in (0, 1):
        rows_then = versions[number]
        assert rows_then is not None
        np.testing.assert_array_equal(rows_then.read(0, ids), found[number])
        versions[number] = None
        train(shard, 1, 2)


def test_rows_of_a_generation_that_is_over_are_not_read() -> None:
    shard = begin()
    train(shard, 1)
    kept = shard.keep(average=False).rows
    assert kept is not None
    shard.initialize(np.zeros(shard.layout.size, np.float32))
    with pytest.raises(CheckpointError, match="begins anew"):
        kept.read(0, np.array([1]))


def test_rows_of_a_result_are_let_go_with_it() -> None:
    shard, count = begin(), 20_000
    assert shard.tables is not None
    train(shard, *range(count))
    tracemalloc.start()
    try:
        assert [len(found.ids) for found in shard.tables.trained()] == [count]
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak > 16 * count
    assert kept < count


def test_kept_rows_that_nothing_has_forgotten_since_are_found_without_sorting_the_table() -> None:
    shard, count = begin(forget_after=100), 20_000
    train(shard, *range(count))
    first, kept = (shard.keep(average=False).rows for _ in range(2))
    assert first is not None and kept is not None
    first.read(0, np.arange(-1, 1))  # it compiles
    tracemalloc.start()
    try:
        kept.read(0, np.arange(-1, 1))
        assert tracemalloc.get_traced_memory()[1] < count
    finally:
        tracemalloc.stop()
