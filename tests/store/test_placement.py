from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from zmqtrain.store.checkpoint import tensors_of
from zmqtrain.store.layout import ALIGNMENT, DTYPES, Slice, Variable, empty_values
from zmqtrain.store.manifest import tensor_records
from zmqtrain.store.placement import nearest, place, with_copies


def _variables(*shapes: tuple[int, ...]) -> list[Variable]:
    return [Variable(f"v{number}", shape) for number, shape in enumerate(shapes)]


def _rows(variable: Variable, shards: int, partition_nbytes: int) -> list[int]:
    layouts = place([variable], shards, "round-robin", partition_nbytes)
    chunks = [chunk for layout in layouts for chunk in layout.slices]
    return [chunk.rows for chunk in sorted(chunks, key=lambda chunk: chunk.start)]


def _shard_of_each(layouts: tuple, names: list[str]) -> list[int]:
    held = {chunk.variable.name: at.shard for at in layouts for chunk in at.slices}
    return [held[name] for name in names]


@pytest.mark.parametrize(
    ("shape", "shards", "partition_nbytes", "expected"),
    [
        ((13,), 5, 1, [3, 3, 3, 2, 2]),
        ((12,), 3, 1, [4, 4, 4]),
        ((2, 100), 5, 1, [1, 1]),  # no more parts than rows
        ((100,), 3, 1, [34, 33, 33]),  # no more parts than shards
        ((100,), 8, 200, [50, 50]),  # 400 bytes
        ((100,), 8, 199, [34, 33, 33]),  # the quotient is rounded up
        ((100,), 8, 400, [100]),
        ((100,), 8, 0, [100]),  # cutting turned off
        ((), 5, 1, [1]),
        ((1,), 5, 1, [1]),
        ((0,), 5, 1, [0]),
        ((0, 3), 5, 1, [0]),
        ((4, 0), 5, 1, [4]),
    ],
)
def test_variable_is_cut_by_the_min_max_rule(
    shape: tuple[int, ...], shards: int, partition_nbytes: int, expected: list[int]
) -> None:
    assert _rows(Variable("v", shape), shards, partition_nbytes) == expected


def test_default_partition_size_is_256_kib() -> None:
    rows = 256 * 1024 // 4
    assert [len(at.slices) for at in place([Variable("v", (rows,))], 3)] == [1, 0, 0]
    assert [len(at.slices) for at in place([Variable("v", (rows + 1,))], 3)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("strategy", "sizes", "expected"),
    [
        ("round-robin", [8, 1, 1, 1, 1], [0, 1, 2, 0, 1]),
        ("round-robin", [0, 8, 0, 8], [0, 1, 2, 0]),
        ("greedy", [8, 1, 1, 1, 1], [0, 1, 2, 1, 2]),
        ("greedy", [2, 2, 2, 2], [0, 1, 2, 0]),  # ties go to the lowest index
        ("greedy", [1, 2, 8, 8], [0, 1, 2, 0]),  # creation order, not sorted by size
        ("greedy", [0, 0, 3, 0], [0, 0, 0, 1]),  # nothing to carry leaves the tie as it was
    ],
)
def test_whole_variables_go_where_the_strategy_says(
    strategy: str, sizes: list[int], expected: list[int]
) -> None:
    variables = _variables(*[(size,) for size in sizes])
    layouts = place(variables, 3, strategy, 0)
    assert _shard_of_each(layouts, [v.name for v in variables]) == expected


@pytest.mark.parametrize(
    ("rows", "shards", "partition_nbytes", "expected"),
    [
        ([10, 10], 2, 4, [[(0, 0, 10)], [(1, 0, 10)]]),
        ([20], 2, 4, [[(0, 0, 10)], [(0, 10, 10)]]),
        ([4, 8, 6], 3, 4, [[(0, 0, 4), (1, 0, 2)], [(1, 2, 6)], [(2, 0, 6)]]),
        ([7, 3], 2, 28, [[(0, 0, 7)], [(1, 0, 3)]]),  # what is small stays whole
        ([7, 3], 2, 0, [[(0, 0, 7)], [(1, 0, 3)]]),
        ([0, 2, 0], 3, 4, [[(0, 0, 0)], [(1, 0, 1)], [(1, 1, 1), (2, 0, 0)]]),
    ],
)
def test_contiguous_cuts_the_line_of_all_variables_into_equal_shards(
    rows: list[int], shards: int, partition_nbytes: int, expected: list[list[tuple[int, int, int]]]
) -> None:
    layouts = place(_variables(*((n,) for n in rows)), shards, "contiguous", partition_nbytes)
    held = [[(int(c.variable.name[1:]), c.start, c.rows) for c in at.slices] for at in layouts]
    assert held == expected


def test_round_robin_counter_runs_on_over_parts() -> None:
    layouts = place(_variables((2,), (2,), (1,)), 3, "round-robin", 4)
    held = [[(chunk.variable.name, chunk.start) for chunk in at.slices] for at in layouts]
    assert held == [[("v0", 0), ("v1", 1)], [("v0", 1), ("v2", 0)], [("v1", 0)]]


def test_greedy_places_each_part_on_its_own() -> None:
    layouts = place(_variables((5,), (4,)), 2, "greedy", 8)
    held = [[(p.variable.name, p.start, p.rows, p.offset) for p in at.slices] for at in layouts]
    assert held == [[("v0", 0, 3, 0), ("v1", 2, 2, 16)], [("v0", 3, 2, 0), ("v1", 0, 2, 16)]]


shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8)
strategies = st.sampled_from(["round-robin", "greedy", "contiguous"])


@given(shapes, st.integers(1, 9), strategies, st.integers(0, 200))
def test_every_element_is_held_exactly_once(
    shapes: list[tuple[int, ...]], shards: int, strategy: str, partition_nbytes: int
) -> None:
    variables = _variables(*shapes)
    layouts = place(variables, shards, strategy, partition_nbytes)
    assert layouts == place(variables, shards, strategy, partition_nbytes)
    assert [layout.shard for layout in layouts] == list(range(shards))
    held = {v.name: np.zeros(v.shape, np.int64) for v in variables}
    for layout in layouts:
        end = 0
        for chunk in layout.slices:
            assert chunk.offset % ALIGNMENT == 0
            assert 0 <= chunk.offset - end < ALIGNMENT
            end = chunk.end
            part = chunk.of(held[chunk.variable.name])
            assert part.shape == chunk.shape
            part += 1
        assert layout.size == end
    assert all((counts == 1).all() for counts in held.values())


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6
    ),
    st.integers(1, 4),
    st.integers(0, 50),
    st.data(),
)
def test_state_of_every_dtype_is_carried_to_the_last_bit(
    kinds: list[tuple[str, list[int]]], shards: int, partition_nbytes: int, data: st.DataObject
) -> None:
    trained = Variable("w", (7,))
    state = [Variable(f"s{n}", tuple(s), dtype, "state") for n, (dtype, s) in enumerate(kinds)]
    values = {v.name: data.draw(arrays(v.dtype, v.shape)) for v in (*state, trained)}
    back = empty_values([*state, trained])
    for layout in place([*state, trained], shards, "greedy", partition_nbytes):
        flat = layout.flat_of(values)
        places = [cut.variable.place for cut in layout.slices]
        assert places == sorted(places)
        ends = [cut.end for cut in layout.slices if cut.variable.kind == "trained"]
        assert layout.trained >= max(ends, default=0)
        assert np.isfinite(flat[layout.averaged :]).all()
        layout.scatter(flat, back)
    for name, value in values.items():
        assert back[name].dtype == value.dtype
        np.testing.assert_array_equal(back[name], value)


def _name(cut: Slice) -> tuple[str, int, int]:
    return cut.variable.name, cut.start, cut.rows


@given(shapes, st.integers(1, 6), strategies, st.integers(0, 200), st.data())
def test_every_slice_is_owned_once_and_held_by_neighbours(
    shapes: list[tuple[int, ...]], shards: int, strategy: str, nbytes: int, data: st.DataObject
) -> None:
    copies = data.draw(st.integers(1, shards))
    placed = place(_variables(*shapes), shards, strategy, nbytes)
    layouts = with_copies(placed, copies)
    if copies == 1:
        assert layouts == placed
    for layout, own in zip(layouts, placed, strict=True):
        assert [_name(cut) for cut in layout.slices if not cut.copy] == list(map(_name, own.slices))
        before = [placed[layout.shard - back] for back in range(1, copies)]
        copied = {_name(cut) for cut in layout.slices if cut.copy}
        assert copied == {_name(cut) for one in before for cut in one.slices}
        inside = [cut for cut in layout.slices if cut.size and _lies_in(cut, layout.owned)]
        assert not any(cut.copy for cut in inside)
        assert all(_lies_in(cut, layout.owned) for cut in layout.slices if not cut.copy)


def _lies_in(cut: Slice, run: slice) -> bool:
    return not cut.size or (run.start <= cut.offset and cut.end <= run.stop)


@given(shapes, st.integers(2, 5), st.data())
def test_each_slice_is_read_near_by_or_from_its_owner(
    shapes: list[tuple[int, ...]], shards: int, data: st.DataObject
) -> None:
    copies = data.draw(st.integers(1, shards))
    near = data.draw(st.sets(st.integers(0, shards - 1)))
    layouts = with_copies(place(_variables(*shapes), shards, "contiguous", 4), copies)
    seen = nearest(layouts, near)
    read = [(layout.shard, _name(cut)) for layout in seen for cut in layout.slices if not cut.copy]
    owners = {_name(cut): at.shard for at in layouts for cut in at.slices if not cut.copy}
    assert sorted(name for _, name in read) == sorted(owners)
    for shard, name in read:
        holders = {at.shard for at in layouts for cut in at.slices if _name(cut) == name}
        assert shard in holders & near if holders & near else shard == owners[name]


def test_shards_that_hold_everything_have_the_layout_of_one() -> None:
    variables = _variables((5,), (40, 3), (7,))
    (one,) = place(variables, 1)
    for layout in with_copies(place(variables, 3, "contiguous", 0), 3):
        assert [(_name(cut), cut.offset) for cut in layout.slices] == [
            (_name(cut), cut.offset) for cut in one.slices
        ]


def test_checkpoint_has_each_slice_once_from_its_owner() -> None:
    variables = _variables((5,), (40, 3), (7,))
    layouts = with_copies(place(variables, 3, "contiguous", 4), 2)
    written = []
    for layout in layouts:
        flat = np.zeros(layout.size, np.float32)
        written += [(layout.shard, tensor) for tensor in tensors_of(layout, flat, {}, {})]
    records = tensor_records(variables, layouts, {})["parameters"].values()
    assert sorted(written) == sorted((s.shard, s.tensor) for one in records for s in one.slices)
    assert len({tensor for _, tensor in written}) == len(written)
