"""Tables in checkpoints: any number of shards reads what any number has written."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.store.with_tables import EXTREMES, VARIABLES, Job, collected, push, table, tensors_of
from zmqtrain.coordination.hand_over import left_of
from zmqtrain.errors import CheckpointError
from zmqtrain.models.tables import RowsOf, TableVariable, shards_of
from zmqtrain.optim import SGD, Adagrad, Adam, RowwiseAdagrad, Rule, Update
from zmqtrain.protocol.checkpoint import LedgerState
from zmqtrain.protocol.orders import Apply
from zmqtrain.store import row_snapshot
from zmqtrain.store.checkpoint import begin, commit, seal_shard
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.manifest import Manifest, read_manifest, tensor_records, verify
from zmqtrain.store.shard import Shard
from zmqtrain.store.table_checkpoint import table_records

USER, ITEM = table("user/with @ü", 0, 4), table("item", 1, 2, admit_after=2, forget_after=5)
JOB = Job([USER, ITEM], [Update(Adam(0.1)), Update(RowwiseAdagrad(0.1))])
EVERY = np.unique(np.array([*range(60), *EXTREMES]))


def train(shards: Sequence[Shard], updates: int) -> None:
    """Make updates, each of which trains some rows of both tables; each shard gets its own."""
    for _ in range(updates):
        version = shards[0].version
        for shard in shards:
            random, parts = np.random.default_rng(version), []
            for of in JOB.tables:
                ids = np.sort(random.choice(EVERY, 30, replace=False))
                values = random.standard_normal((30, of.dim), np.float32)
                assert shard.tables is not None
                own = shard.tables.place.holds(shards_of(ids, len(shards)))
                parts.append(RowsOf(of.number, ids[own], values[own]))
            push(shard, 0, parts, seed=version)
            shard.carry_out(Apply(0))


def save(shards: Sequence[Shard], logdir: Path) -> Path:
    directory = begin(logdir, 1)
    layouts = [shard.layout for shard in shards]
    files = [seal_shard(s.write(directory), s.layout.shard, s.version) for s in shards]
    manifest = Manifest(
        fingerprint={},
        generation=1,
        global_step=shards[0].version,
        policy="hogwild",
        ledger=LedgerState(7, (3, 5), 200),
        worker_marks={},
        files=tuple(files),
        tensors=tensor_records(VARIABLES, layouts, JOB.update.initial_slots(["b"])),
        tables=table_records(JOB.layouts),
    )
    return commit(directory, manifest)


def restored(path: Path, count: int, copies: int = 1) -> list[Shard]:
    manifest = read_manifest(path)
    verify(path, manifest)
    shards = JOB.shards(count, copies)
    for shard in shards:
        shard.restore(path, manifest)
    return shards


def contents(
    shards: Sequence[Shard], layouts: Sequence[ShardLayout] = ()
) -> list[dict[str, dict[int, Any]]]:
    """Return, for each tensor of tables, what each id has in any of the shards."""
    pairs = [*zip(shards, layouts or [shard.layout for shard in shards], strict=True)]
    found: list[dict[str, dict[int, Any]]] = []
    for keys in (["ids", "stamps", "rows"], ["candidates", "counts"]):
        for of in JOB.tables:
            held: dict[str, dict[int, Any]] = {}
            for shard, layout in pairs:
                assert shard.tables is not None
                tensors = tensors_of(shard, layout)
                names = [n for n in tensors if n.endswith(f"/{of.name}")]
                slots = [n for n in names if n.startswith("/slot")] if keys[0] == "ids" else []
                ids = tensors.get(f"/{keys[0]}/{of.name}", np.empty(0, np.int64)).tolist()
                for name in [*(f"/{key}/{of.name}" for key in keys), *slots]:
                    values = tensors.get(name, np.empty(0))
                    own = held.setdefault(name, {})
                    assert not own.keys() & set(ids)
                    own |= {id_: v.tobytes() for id_, v in zip(ids, values, strict=True)}
            found.append(held)
    return found


def begun(count: int, copies: int = 1) -> list[Shard]:
    shards = JOB.shards(count, copies)
    for shard in shards:
        shard.initialize(np.zeros(shard.layout.size, np.float32))
    return shards


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 2), (1, 3), (2, 1)])
def test_any_number_of_shards_goes_on_from_a_checkpoint(
    before: int, after: int, tmp_path: Path
) -> None:
    shards = begun(before)
    train(shards, 4)
    again = restored(save(shards, tmp_path), after)
    assert contents(again) == contents(shards)
    assert all(len(held) for held in contents(again)[0].values())
    train(shards, 3)
    train(again, 3)
    assert contents(again) == contents(shards)


def test_holders_write_each_row_once_and_read_all_that_they_hold(tmp_path: Path) -> None:
    count, copies = 4, 2
    shards = begun(count, copies)
    train(shards, 4)
    alone = begun(1)
    train(alone, 4)
    assert contents(shards) == contents(alone)
    again = restored(save(shards, tmp_path), count, copies)
    assert contents(again) == contents(alone)
    train(again, 3)
    train(alone, 3)
    assert contents(again) == contents(alone)
    left = left_of([shard.layout for shard in again], (0, 2))
    assert left is not None
    assert contents([again[0], again[2]], [*left.values()]) == contents(alone)


def test_tables_without_a_trained_row_are_saved_and_restored(tmp_path: Path) -> None:
    path = save(begun(2), tmp_path)
    (shard,) = restored(path, 1)
    assert shard.tables is not None
    np.testing.assert_array_equal(shard.tables.rows(0, EVERY), USER.initial_rows(EVERY))


def test_file_has_ids_rows_and_slots_of_each_table(tmp_path: Path) -> None:
    shards = begun(1)
    train(shards, 3)
    tensors = load_file(save(shards, tmp_path) / "shard-00000.safetensors")
    trained = len(tensors["/ids/user/with @ü"])
    assert tensors["/rows/user/with @ü"].shape == (trained, 4)
    assert tensors["/slot.m/user/with @ü"].shape == (trained, 4)
    assert tensors["/slot.accumulator/item"].shape == (len(tensors["/ids/item"]), 1)
    assert (np.diff(tensors["/ids/user/with @ü"]) > 0).all()
    assert tensors["/stamps/item"].max() == 3


@settings(max_examples=25)
@given(updates=st.lists(st.integers(0, 3), min_size=1, max_size=12), block=st.integers(1, 40))
def test_checkpoint_has_the_rows_of_its_version_whatever_changes_while_it_is_written(
    updates: list[int], block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_snapshot, "_BLOCK", block)
        (shard,) = shards = begun(1)
        train(shards, 4)
        expected = {name: array.tobytes() for name, array in tensors_of(shard).items()}
        assert shard.tables is not None
        frozen, rest = shard.tables.freeze(), iter(updates)
        for one in frozen:
            write = one.write

            def changing(take: Any, write: Any = write) -> None:
                def then(name: str, rows: Any, at: int) -> None:
                    take(name, rows, at)
                    train(shards, next(rest, 0))

                train(shards, next(rest, 0))
                write(then)

            one.write = changing  # type: ignore[method-assign]
        assert {name: array.tobytes() for name, array in collected(frozen).items()} == expected


@pytest.mark.parametrize("end", ["begins anew", "ends"])
def test_checkpoint_whose_rows_are_gone_is_given_up(end: str, tmp_path: Path) -> None:
    (shard,) = shards = begun(1)
    train(shards, 2)
    copy = shard.write(begin(tmp_path, 1))
    assert shard.tables is not None
    if end == "begins anew":
        shard.initialize(np.zeros(shard.layout.size, np.float32))
    else:
        shard.tables.memory.close()
    with pytest.raises(CheckpointError, match=f"no longer those of this checkpoint, .* {end}"):
        seal_shard(copy, 0, shard.version)


def test_checkpoint_is_written_while_another_thread_trains(tmp_path: Path) -> None:
    (shard,) = shards = begun(1)
    train(shards, 5)
    expected = tensors_of(shard)
    copy = shard.write(begin(tmp_path, 1))
    with ThreadPoolExecutor(1) as pool:
        sealed = pool.submit(seal_shard, copy, 0, shard.version)
        while not sealed.done():
            train(shards, 1)
        sealed.result()
    found = load_file(copy.path)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


OTHERS: dict[str, tuple[TableVariable, Rule, str]] = {
    "dim": (table("item", 0, 3), RowwiseAdagrad(0.1), "'item' has rows of 2 in it and of 3 in"),
    "table": (table("ad", 0, 2), SGD(0.1), "no table 'ad'; its tables: user/with @ü, item;"),
    "slots": (table("item", 0, 2), Adam(0.1), "no optimizer slot 'm' .* accumulator with 1; it"),
    "width": (table("item", 0, 2), Adagrad(0.1), "no optimizer slot 'accumulator' with 2 elements"),
}


@pytest.mark.parametrize(("variable", "rule", "text"), OTHERS.values(), ids=OTHERS)
def test_checkpoint_of_other_tables_is_refused(
    variable: TableVariable, rule: Rule, text: str, tmp_path: Path
) -> None:
    path = save(begun(1), tmp_path)
    (shard,) = Job([variable], [Update(rule)]).shards(1)
    with pytest.raises(CheckpointError, match=text):
        shard.restore(path, read_manifest(path))


def test_another_rule_with_fewer_slots_goes_on_without_them(tmp_path: Path) -> None:
    shards = begun(2)
    train(shards, 3)
    path = save(shards, tmp_path)
    (shard,) = Job([USER], [Update(SGD(0.1))]).shards(1)
    shard.restore(path, read_manifest(path))
    assert shard.tables is not None
    rows = np.concatenate([s.tables.rows(0, EVERY)[:, None] for s in shards if s.tables], axis=1)
    own = shards_of(EVERY, 2)
    np.testing.assert_array_equal(shard.tables.rows(0, EVERY), rows[np.arange(len(EVERY)), own])


@pytest.mark.parametrize("tensor", ["/rows/item", "/ids/item", "/slot.accumulator/item"])
def test_file_whose_tensors_do_not_fit_together_is_refused(tensor: str, tmp_path: Path) -> None:
    shards = begun(1)
    train(shards, 4)
    path = save(shards, tmp_path)
    file = path / "shard-00000.safetensors"
    tensors = load_file(file)
    save_file(tensors | {tensor: tensors[tensor][1:]}, file)
    (shard,) = JOB.shards(1)
    with pytest.raises(CheckpointError, match=r"/item' has shape \[.*, expected .*; resume from"):
        shard.restore(path, read_manifest(path))
