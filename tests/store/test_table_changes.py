"""Changes of tables: equal to dense ones, and finished by the next life bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import until
from tests.kills import dying_at
from tests.store import with_tables
from tests.store.conftest import CutParts
from tests.store.with_tables import DENSE, Job, close, push, remove, rows, table, tensors_of
from zmqtrain.errors import ConfigError
from zmqtrain.models.tables import Given
from zmqtrain.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Momentum,
    RMSProp,
    RowwiseAdagrad,
    Rule,
    Slot,
    Update,
    redo,
)
from zmqtrain.protocol.orders import Accumulate, Apply, Order, Reduce
from zmqtrain.store import changes, held_table, row_buffer, row_snapshot, row_store
from zmqtrain.store import shard as shards
from zmqtrain.store.holdings import tables
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.segment_layout import PART_SIZE, PARTS, PROGRESS_AT, PROGRESS_STRIDE
from zmqtrain.store.shard import Shard
from zmqtrain.store.table_checkpoint import FrozenTable

ROWS, DIM = 40, 3

EXACT = {
    "sgd": Update(SGD(0.1)),
    "adagrad": Update(Adagrad(0.1)),
    "ftrl": Update(Ftrl(0.1, l1=0.01)),
    "clipped by norm": Update(SGD(0.1), clip_norm=0.5),
    "clipped by norm and value": Update(Adagrad(0.1), clip_norm=0.7, clip_value=0.3),
    "clipped by value": Update(SGD(0.1), clip_value=0.2),
}
"""Rules that leave a row whose gradient is zero as it is. FTRL does, once its rows are zero."""


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[Order, list[tuple[list[int], float]]]]:
    """Orders, and before each the ids and the weight of every worker's gradient."""
    found = []
    for _ in range(draw(st.integers(1, 8))):
        workers = draw(st.integers(1, 3))
        ids = st.lists(st.integers(0, ROWS - 1), max_size=15, unique=True)
        weights = st.sampled_from([4.0, 4.0, 3.0, 1.0])
        pushes = draw(st.lists(st.tuples(ids, weights), min_size=workers, max_size=workers))
        chosen = [Apply(0), Accumulate(0), Reduce(tuple(range(workers)))]
        found.append((draw(st.sampled_from(chosen)), pushes))
    return found


@pytest.mark.parametrize("update", EXACT.values(), ids=EXACT)
@settings(max_examples=30)
@given(steps=steps())
def test_table_has_the_bits_of_the_same_variable_trained_densely(update: Update, steps) -> None:
    zeros = Given(np.zeros((ROWS, DIM), np.float32))
    variable = table("t", 0, DIM, rows=ROWS, initial=zeros)
    every = np.arange(ROWS)
    (layout,) = place([Variable("t", (ROWS, DIM))], 1, partition_nbytes=10**6)
    dense = Shard(layout, update, batch_size=4)
    dense.initialize(layout.flat_of({"t": variable.initial_rows(every)}))
    sparse = Job([variable], [update], update).begin()
    for number, (order, pushes) in enumerate(steps, start=1):
        for worker, (ids, weight) in enumerate(pushes):
            part = rows(variable, 10 * number + worker, ids)
            gradient = np.zeros((ROWS, DIM), np.float32)
            gradient[part.ids] = part.rows
            dense.segment.gradient(worker)[:] = layout.flat_of({"t": gradient})
            dense.stage(worker, worker, number, weight)
            push(sparse, worker, [part] if ids else [], weight)
        dense.carry_out(order)
        sparse.carry_out(order)
        assert sparse.tables is not None
        of_dense = dense.parameters[: ROWS * DIM].tobytes()
        assert sparse.tables.rows(0, every).tobytes() == of_dense, f"after {order}"


LAZY: list[Rule] = [Adam(0.1), AdamW(0.1), Momentum(0.1), RMSProp(0.1), RowwiseAdagrad(0.1)]


@pytest.mark.parametrize("rule", LAZY, ids=repr)
def test_lazy_rules_change_touched_rows_alone_as_their_formula_says(rule: Rule) -> None:
    variable = table("t", 0, DIM)
    shard = Job([variable], [Update(rule)]).begin()
    assert shard.tables is not None
    ids = np.arange(-3, 20)
    expected = {"w": variable.initial_rows(ids)}
    dim_of = {slot.name: 1 if slot.by_row else DIM for slot in rule.slots}
    expected |= {s.name: np.full((len(ids), dim_of[s.name]), s.initial) for s in rule.slots}
    own: Rule = rule.of_rows(DIM) if isinstance(rule, RowwiseAdagrad) else rule
    for step in range(6):
        part = rows(variable, step, [-3, step, 7, 2 * step])
        push(shard, 0, [part])
        shard.carry_out(Apply(0))
        at = np.searchsorted(ids, part.ids)
        flats = {name: array[at].astype(np.float32).ravel() for name, array in expected.items()}
        w = flats.pop("w")
        own.update(w, part.rows.ravel(), flats, step)
        for name, flat in (flats | {"w": w}).items():
            expected[name][at] = flat.reshape(len(at), -1)
    np.testing.assert_array_equal(shard.tables.rows(0, ids), expected["w"])


class Anchored:
    """Pulls parameters back to where they began."""

    slots = (Slot("anchor", None),)

    def update(self, parameters: Any, gradient: Any, slots: Any, step: int) -> None:
        parameters -= np.float32(0.5) * (gradient + parameters - slots["anchor"])


def test_slot_may_begin_with_the_row_itself() -> None:
    variable = table("t", 0, DIM)
    shard = Job([variable], [Update(Anchored())]).begin()
    assert shard.tables is not None
    part = rows(variable, 1, [3, 5])
    begin = variable.initial_rows(part.ids)
    expected = begin.copy()
    for _ in range(3):
        push(shard, 0, [part])
        shard.carry_out(Apply(0))
        expected -= np.float32(0.5) * (part.rows + expected - begin)
    np.testing.assert_array_equal(shard.tables.rows(0, part.ids), expected)


@pytest.mark.parametrize("missed", [0, 1, 7, 300])
@pytest.mark.parametrize(
    "rule",
    [Adam(0.01, catch_up=True), AdamW(0.01, weight_decay=0.1, amsgrad=True, catch_up=True)],
    ids=lambda rule: type(rule).__name__,
)
def test_row_that_comes_again_makes_up_for_the_updates_without_it(rule: Rule, missed: int) -> None:
    """Moments and decay are those of as many gradients of zero, but for rounding."""
    variable = table("t", 0, DIM)
    shard = Job([variable], [Update(rule)]).begin()
    assert shard.tables is not None
    first = rows(variable, 1, [3])
    push(shard, 0, [first])
    shard.carry_out(Apply(0))
    before = {name: array[0] for name, array in of_row(shard).items()}
    for _ in range(missed):
        push(shard, 0, [rows(variable, 2, [4])])
        shard.carry_out(Apply(0))
    np.testing.assert_array_equal(of_row(shard)["rows"][0], before["rows"])  # it waits
    dense = {name: before[f"slot.{name}"].copy() for name in (s.name for s in rule.slots)}
    w, zero = before["rows"].copy(), np.zeros(DIM, np.float32)
    for step in range(1, 1 + missed):
        if isinstance(rule, AdamW):
            w -= np.float32(0.01 * 0.1) * w
        rule.update(w.copy(), zero, dense, step)
    last = rows(variable, 3, [3])
    rule.update(w, last.rows.ravel(), dense, 1 + missed)
    push(shard, 0, [last])
    shard.carry_out(Apply(0))
    found = of_row(shard)
    tolerance = 3e-7 * (1 + missed)
    np.testing.assert_allclose(found["rows"][0], w, rtol=tolerance)
    for name, expected in dense.items():
        np.testing.assert_allclose(found[f"slot.{name}"][0], expected, rtol=tolerance)


def of_row(shard: Shard) -> dict[str, Any]:
    """Return the parts of the rows of the table "t", the row of id 3 first."""
    return {
        name.removeprefix("/").removesuffix("/t"): array
        for name, array in tensors_of(shard).items()
    }


COMPILED: list[Rule] = [SGD(0.1), Adagrad(0.1), Ftrl(0.1), *LAZY]


@pytest.mark.parametrize("options", [{}, {"l2": 0.1}, {"clip_norm": 0.5}, {"clip_value": 0.1}])
@pytest.mark.parametrize("rule", COMPILED, ids=repr)
def test_compiled_training_has_the_bits_of_numpy(rule: Rule, options: dict[str, float]) -> None:
    of_tables = [table("t", 0, DIM), table("u", 1, 5), table("v", 2, DIM)]
    shards = []
    for fused in (True, False):
        own, other = Update(rule, fused=fused, **options), Update(SGD(0.2), fused=fused, **options)
        shards.append(Job(of_tables, [own, other, own], DENSE).begin())
    for step in range(4):
        for shard in shards:
            for worker in range(2):
                push(shard, worker, [rows(each, 2 * step + worker) for each in of_tables], seed=3)
            shard.carry_out(Reduce((0, 1)) if step % 2 else Apply(0))
    ours, theirs = map(Job(of_tables, []).contents, shards)
    assert ours == theirs


def test_rule_for_rows_is_refused_for_dense_variables() -> None:
    (layout,) = place([Variable("w", (5,))], 1)
    shard = Shard(layout, Update(RowwiseAdagrad(0.05)))
    shard.initialize(np.zeros(layout.size, np.float32))
    shard.stage(0, 0)
    with pytest.raises(ConfigError, match="is a rule for rows of tables"):
        shard.carry_out(Apply(0))


STRIDE = int(os.environ.get("STRIDE", "29"))
OF_CHANGES = shards, changes, tables, held_table, row_buffer, row_store, row_snapshot
INTERRUPTED = [module.__file__ for module in OF_CHANGES]

LIVES = Job(
    [table("user", 0, 4), table("item", 1, 2, admit_after=1, forget_after=2, max_rows=10)],
    [Update(Adam(0.1, catch_up=True), fused=False), Update(RowwiseAdagrad(0.1))],
)
"""Rows of some blocks in one table; admission, and both ways to forget, in the other."""

BEING_WRITTEN: list[FrozenTable] = []
"""What a checkpoint of the last shard keeps."""


def before_the_end(path: Path) -> Shard:
    """Return a shard with a sum, of which the next update is the fourth."""
    shard = LIVES.begin(path)
    for number in range(3):
        push(shard, 0, [rows(each, number % 2) for each in LIVES.tables], seed=number)
        shard.carry_out(Apply(0))
    push(shard, 1, [rows(each, 5) for each in LIVES.tables], 3, seed=4)
    shard.carry_out(Accumulate(1), 6)
    assert shard.tables is not None
    BEING_WRITTEN[:] = shard.tables.freeze()
    return shard


def last_order(shard: Shard, order: Order) -> None:
    for worker in range(2):
        parts = [rows(each, 7 + worker) for each in LIVES.tables]
        push(shard, worker, parts, 3 + worker, seed=8 + worker)
    shard.carry_out(order, 7)


@pytest.mark.parametrize("order", [Accumulate(1), Reduce((1, 0))], ids=repr)
def test_change_of_a_killed_process_is_finished_or_never_was(
    order: Order, cut_parts: CutParts, tmp_path: Path
) -> None:
    cut_parts(table_block=24)
    tmp_path.chmod(0o700)
    reference = before_the_end(tmp_path / "reference")
    before = LIVES.contents(reference)
    last_order(reference, order)
    after = LIVES.contents(reference)
    remove(reference)
    found = {before[:2]: 0, after[:2]: 0}
    first = random.randrange(STRIDE)  # so that every line has its turn
    for line in count(first, STRIDE):
        shard = before_the_end(tmp_path / "ps")
        died = dying_at(line, lambda shard=shard: last_order(shard, order), INTERRUPTED)
        shard.segment.close()  # its tables stay as they are: their snapshot may be locked
        adopted = LIVES.adopt(tmp_path / "ps")
        contents = LIVES.contents(adopted)
        assert contents == (after if contents[:2] == after[:2] else before), f"line {line}"
        if contents[:2] == before[:2]:
            last_order(adopted, order)
            assert LIVES.contents(adopted) == after, f"line {line}"
        found[contents[:2]] += 1
        remove(adopted)
        if not died:
            break
    assert min(found.values()) > 1


def a_part_is_under_way(path: Path) -> bool:
    """Return whether a thread is in the middle of a part of the dense parameters."""
    words = np.memmap(path, np.int64, "r", PROGRESS_AT, (PARTS, PROGRESS_STRIDE // 8))
    done = words[:, redo.DONE].copy()
    return bool(((done > 0) & (done < PART_SIZE)).any())


def test_killed_processes_leave_what_the_next_finishes_bit_for_bit(tmp_path: Path) -> None:
    """SIGKILL anywhere, in compiled code too."""
    seed = random.randrange(10**6)
    choose = random.Random(seed)
    tmp_path.chmod(0o700)
    path = tmp_path / "ps"
    close(with_tables.KILLED.begin(path))
    reference = with_tables.KILLED.begin()
    for is_under_way in (False, True, False):
        command = [sys.executable, "-m", "tests.store.with_tables", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as updater:
            assert updater.stdout is not None
            assert updater.stdout.readline() == b"begun\n"
            try:
                if is_under_way:
                    until(partial(a_part_is_under_way, path), "a part under way", str)
                else:
                    time.sleep(choose.random() * 0.1)  # any moment is a good one
            finally:
                updater.kill()
        shard = with_tables.KILLED.adopt(path)
        while reference.version < shard.version:
            with_tables.update(reference)
        if shard.accumulated:
            with_tables.update(shard)
            with_tables.update(reference)
        ours, theirs = map(with_tables.KILLED.contents, (shard, reference))
        assert ours == theirs, f"seed {seed}, version {shard.version}"
        close(shard)
