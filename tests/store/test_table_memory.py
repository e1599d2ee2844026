"""Rows by id in shared memory: a dict, whatever is inserted and forgotten, and whoever reads."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.with_tables import EXTREMES, Job, push, rows, table
from zmqtrain.errors import SegmentError
from zmqtrain.models.tables import TableVariable
from zmqtrain.optim import LAMB, SGD, Adam, RowwiseAdagrad, Rule, Update
from zmqtrain.protocol.orders import Apply
from zmqtrain.store import arena
from zmqtrain.store.row_store import RowStore
from zmqtrain.store.table_layout import MOVED, RESERVED, STATE, TableLayout
from zmqtrain.store.table_memory import TableMemory, reach

VARIABLE = table("user", 0, 2)
LAYOUTS = [TableLayout(VARIABLE)]

IDS = st.lists(st.one_of(st.sampled_from(EXTREMES), st.integers(0, 40)), max_size=20, unique=True)
CHANGES = st.lists(st.tuples(st.sampled_from(["insert", "erase", "clear", "grow"]), IDS))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "ps.tables"


def inserted(store: RowStore, ids: np.ndarray, value: float) -> None:
    store.make_room(len(ids))
    store.insert(ids, [np.full((len(ids), 2), value, np.float32)])


@settings(max_examples=60)
@given(changes=CHANGES)
def test_store_holds_what_a_dict_holds(changes: list[tuple[str, list[int]]]) -> None:
    memory = TableMemory.private(LAYOUTS)
    store, model = memory.stores[0], dict[int, float]()
    for number, (change, chosen) in enumerate(changes, start=1):
        ids = np.array(sorted(chosen), np.int64)
        here = np.array([id_ in model for id_ in ids.tolist()], bool)
        if change == "insert":
            inserted(store, ids[~here], number)
            model |= dict.fromkeys(ids[~here].tolist(), float(number))
        elif change == "erase":
            store.erase(store.find(ids[here])[0])
            model = {id_: value for id_, value in model.items() if id_ not in chosen}
        elif change == "clear":
            store.clear()
            model = {}
        else:
            store.make_room(6000 * number)
        every = np.array(sorted({*model, *EXTREMES, *range(-3, 43)}), np.int64)
        expected = VARIABLE.initial_rows(every)
        for place, id_ in enumerate(every.tolist()):
            if id_ in model:
                expected[place] = model[id_]
        np.testing.assert_array_equal(reach(memory.name, LAYOUTS).read(0, every), expected)
        assert len(store) == len(model)
        found = {
            id_: row[0]
            for ids, _, rows in store.freeze().blocks()
            for id_, row in zip(ids.tolist(), rows, strict=True)
        }
        assert found == model


def test_memory_of_a_dead_life_has_its_rows(directory: Path) -> None:
    memory = TableMemory.create(LAYOUTS, directory)
    ids = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63, 20_000))
    for part in np.array_split(ids, 7):
        inserted(memory.stores[0], part, 3)
    memory.stores[0].erase(memory.stores[0].find(ids[::2])[0])
    memory.close()
    adopted = TableMemory.adopt(LAYOUTS, directory)
    assert adopted is not None
    np.testing.assert_array_equal(adopted.read(0, ids[1::2]), np.full((len(ids) // 2, 2), 3))
    assert (adopted.stores[0].find(ids[::2])[0] < 0).all()
    inserted(adopted.stores[0], ids[::2], 4)
    assert (
        adopted.stores[0].nbytes == memory.stores[0].nbytes
    )  # forgotten rows' memory served again
    adopted.remove()
    assert not directory.exists()


READER = """
import sys
from tests.store.test_table_memory import read_on
read_on(sys.argv[1])
"""


def chunks() -> Iterator[np.ndarray]:
    """Yield ids, sorted, each once."""
    every = np.random.default_rng(1).permutation(200_000).astype(np.int64)
    return (np.sort(part) for part in np.array_split(every, 40))


def read_on(name: str) -> None:
    """Read rows of a table that grows: what was there once stays, and nothing else appears."""
    memory = reach(name, LAYOUTS)
    every, seen = np.arange(0, 200_000, 37), 0
    trained = np.zeros(len(every), bool)
    memory.read(0, every[:0])  # the first read compiles
    sys.stdout.write("reads\n")
    sys.stdout.flush()
    while not trained.all():
        found = memory.read(0, every)
        now = found[:, 0] == 1
        assert (now | (found == VARIABLE.initial_rows(every)).all(axis=1)).all()
        assert (now >= trained).all(), "a row is gone"
        trained, seen = now, seen + 1
    assert seen > 1


def test_another_process_reads_while_a_table_grows(directory: Path) -> None:
    memory = TableMemory.create(LAYOUTS, directory)
    command = [sys.executable, "-c", READER, memory.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reads\n"
        try:
            for part in chunks():
                inserted(memory.stores[0], part, 1)
            assert reader.wait(60) == 0
        finally:
            reader.kill()
    memory.remove()


def test_growth_is_spread_over_changes() -> None:
    """No change moves more than some of the index: the share of all of them, and a minimum."""
    memory = TableMemory.private(LAYOUTS)
    store = memory.stores[0]
    moved = []
    for part in chunks():
        before = store.words[MOVED]
        inserted(store, part, 1)
        moved.append(store.words[MOVED] - before)
    assert max(moved) <= 1 << 16


@pytest.mark.parametrize("number", [0, 3])
def test_buffer_has_what_a_worker_wrote_last(number: int, directory: Path) -> None:
    tables = [TableLayout(VARIABLE), TableLayout(table("item", 1, 3))]
    memory = TableMemory.create(tables, directory)
    worker = reach(memory.name, tables).buffer(number)
    assert memory.buffer(number).read() == []
    many = rows(tables[0].variable, 1, range(50_000))
    for parts in ([many], [rows(t.variable, 2) for t in tables], [rows(VARIABLE, 3, [])], []):
        worker.write(parts)
        found = memory.buffer(number).read()
        assert [one.table for one in found] == [one.table for one in parts]
        for ours, theirs in zip(found, parts, strict=True):
            assert ours.ids.tobytes() == theirs.ids.tobytes()
            assert ours.rows.tobytes() == theirs.rows.tobytes()
    memory.remove()


def test_buffer_of_other_tables_is_refused(directory: Path) -> None:
    memory = TableMemory.create(LAYOUTS, directory)
    other = TableMemory.create([TableLayout(table("t", 0, 2)), *LAYOUTS], directory / "other")
    other.buffer(0).write([rows(table("t", 1, 2), 1)])
    (directory / "buffer-0").write_bytes((directory / "other" / "buffer-0").read_bytes())
    with pytest.raises(SegmentError, match="buffer-0 does not hold rows of these tables"):
        memory.buffer(0).read()
    memory.remove()


@pytest.mark.parametrize(
    "variable", [table("user", 0, 3), table("item", 0, 2), table("user", 0, 2, rows=5)]
)
def test_memory_of_other_tables_is_not_reached(variable: TableVariable, directory: Path) -> None:
    files, private = TableMemory.create(LAYOUTS, directory), TableMemory.private(LAYOUTS)
    for memory in (files, private):
        with pytest.raises(SegmentError, match="is of other tables"):
            reach(memory.name, [TableLayout(variable)])
    assert TableMemory.adopt([TableLayout(variable)], directory) is None
    files.remove()
    with pytest.raises(SegmentError, match="cannot be opened: No such file"):
        reach(files.name, LAYOUTS)
    name = private.name
    del private, memory
    with pytest.raises(SegmentError, match="in memory of its own process"):
        reach(name, LAYOUTS)


def test_file_system_without_room_refuses_rows_and_changes_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = TableMemory.create(LAYOUTS, directory)
    store, ids = memory.stores[0], np.arange(9000)
    inserted(store, ids[:10], 1)

    def full(descriptor: int, at: int, nbytes: int, path: Path) -> None:
        raise SegmentError(f"{path.parent} has no room for {nbytes} B more")

    monkeypatch.setattr(arena, "reserve", full)
    with pytest.raises(SegmentError, match=r"'user' has 10 rows of 24 B .* has no room"):
        store.make_room(9000)
    monkeypatch.undo()
    assert len(store) == 10
    inserted(store, ids[10:], 2)
    assert (store.find(ids)[0] >= 0).all()
    memory.remove()


def test_memory_that_cannot_have_its_size_leaves_no_descriptor(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(SegmentError, match="cannot be made: Invalid argument"):
        arena.create_arena(tmp_path / "rows", -1)
    assert psutil.Process().num_fds() == before


def test_more_rows_than_a_table_has_are_refused() -> None:
    memory = TableMemory.private([TableLayout(table("user", rows=5))])
    with pytest.raises(SegmentError, match=r"'user' has 0 rows of 32 B and would have 6 .* 5;"):
        memory.stores[0].make_room(6)


@pytest.mark.parametrize("rule", [Adam(0.1), LAMB(0.1), RowwiseAdagrad(0.1)])
def test_memory_of_a_dropped_shard_is_unmapped_at_once(rule: Rule) -> None:
    """Without the collector of cycles, since tables map terabytes of addresses."""
    of_rows, dense = (SGD(0.1), rule) if isinstance(rule, LAMB) else (rule, SGD(0.1))
    job = Job([VARIABLE], [Update(of_rows)], Update(dense))
    gc.collect()
    gc.disable()
    try:
        shard = job.begin()
        push(shard, 0, [rows(VARIABLE, seed=1)])
        shard.carry_out(Apply(0))
        assert shard.tables is not None
        mapped = weakref.ref(shard.tables.memory.arena.memory)
        del shard
        assert mapped() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("limit", [None, 4000])
@pytest.mark.parametrize("erased", [0, 3000, 4000])
def test_store_has_room_where_more_rows_need_no_more_memory(limit: int | None, erased: int) -> None:
    """Free records are used again; the index may have to grow though there are enough of them."""
    for asked in (1, 1000, 3500, 4000, 9000):
        store = TableMemory.private([TableLayout(table("user", 0, 2, rows=limit))]).stores[0]
        inserted(store, np.arange(4000), 1)
        store.erase(store.find(np.arange(erased))[0])
        has_room, before = store.has_room(asked), memory_of(store)
        store.make_room(min(asked, store.layout.most - len(store)))
        assert has_room == (memory_of(store) == before), asked
        assert store.has_room(asked), asked


def memory_of(store: RowStore) -> tuple[int, int]:
    """Return how much memory its records have, and where its index is."""
    return store.words[RESERVED], store.words[STATE]
