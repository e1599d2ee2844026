"""Placement of variables on shards: a pure function, with equal results on every task."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

from zmqtrain.store.layout import ALIGNMENT, RowSlice, ShardLayout, Slice, Variable

Strategy: TypeAlias = Literal["round-robin", "greedy", "contiguous"]
Part = TypeVar("Part", Slice, RowSlice)

PARTITION_NBYTES = 256 * 1024


def place(
    variables: Sequence[Variable],
    shards: int,
    strategy: Strategy = "greedy",
    partition_nbytes: int = PARTITION_NBYTES,
    whole: Collection[str] = (),
) -> tuple[ShardLayout, ...]:
    """Return the layout of each shard; together they hold every element exactly once.

    ``whole``: names of variables that are not cut.

    A variable is cut along axis 0 into ``ceil(nbytes / partition_nbytes)`` parts, but no more than
    it has rows or there are shards (TensorFlow's ``min_max_variable_partitioner``); 0 turns cutting
    off. The parts are placed one by one in creation order, state after what is trained:
    ``round-robin`` gives each to the shard after the last one's, ``greedy`` to the shard with the
    fewest bytes, the lowest index on ties (TensorFlow's ``GreedyLoadBalancingStrategy``). With
    fewer parts than shards some stay empty.

    ``contiguous`` lays all variables end to end and cuts that line into equal shards. So fewer
    variables are cut than there are shards, and a worker needs no copy of the others; those of
    ``partition_nbytes`` at most stay whole.
    """
    slices: list[list[Slice]] = [[] for _ in range(shards)]
    sizes = [0] * shards
    turn = 0
    ordered = sorted(variables, key=lambda variable: variable.place)
    if strategy == "contiguous":
        for shard, variable, start, rows in _in_line(ordered, shards, partition_nbytes, whole):
            _append(slices[shard], variable, start, rows)
        return tuple(ShardLayout(shard, tuple(cuts)) for shard, cuts in enumerate(slices))
    for variable in ordered:
        limit = 0 if variable.name in whole else partition_nbytes
        for start, rows in _cut(variable, shards, limit):
            shard = turn % shards if strategy == "round-robin" else sizes.index(min(sizes))
            sizes[shard] += _append(slices[shard], variable, start, rows)
            turn += 1
    return tuple(ShardLayout(shard, tuple(cuts)) for shard, cuts in enumerate(slices))


def with_copies(
    layouts: Sequence[ShardLayout], copies: int, *, has_tables: bool = False
) -> tuple[ShardLayout, ...]:
    """Return these layouts, each with copies of the slices of the ``copies - 1`` shards before it.

    The first shard follows the last. All slices of a shard are in the order of their owners, so
    what it owns of a line (``contiguous``) is one run. ``has_tables``: rows have copies, too.
    """
    if copies == 1:
        return tuple(layouts)
    found = []
    for shard in range(len(layouts)):
        owners = sorted((shard - back) % len(layouts) for back in range(copies))
        held = [(owner, cut) for owner in owners for cut in layouts[owner].slices]
        slices: list[Slice] = []
        for owner, cut in sorted(held, key=lambda each: each[1].variable.place):
            _append(slices, cut.variable, cut.start, cut.rows, copy=owner != shard)
        rows = [RowSlice(owner, owner != shard) for owner in owners if has_tables]
        found.append(ShardLayout(shard, tuple(slices), tuple(rows)))
    return tuple(found)


def nearest(layouts: Sequence[ShardLayout], near: Collection[int]) -> tuple[ShardLayout, ...]:
    """Return the layouts as a reader sees them, for whom some shards are ``near``.

    Each slice is a copy on all shards but the one to read it from: a near one, else its owner.
    """
    read: dict[tuple[str, int], tuple[bool, bool, int]] = {}
    for layout in layouts:
        for part in layout.parts:
            name, holder = _name_of(part), layout.shard
            distance = holder not in near, part.copy, holder
            read[name] = min(read.get(name, distance), distance)

    def seen(parts: Sequence[Part], shard: int) -> tuple[Part, ...]:
        return tuple(replace(part, copy=read[_name_of(part)][-1] != shard) for part in parts)

    return tuple(
        replace(each, slices=seen(each.slices, each.shard), rows=seen(each.rows, each.shard))
        for each in layouts
    )


def _name_of(part: Slice | RowSlice) -> tuple[str, int]:
    return (part.variable.name, part.start) if isinstance(part, Slice) else ("", part.owner)


def _append(
    slices: list[Slice], variable: Variable, start: int, rows: int, *, copy: bool = False
) -> int:
    """Append rows of a variable to a shard; return their number of elements."""
    end = slices[-1].end if slices else 0
    slices.append(Slice(variable, start, rows, -(-end // ALIGNMENT) * ALIGNMENT, copy))
    return slices[-1].size


def _in_line(
    variables: Sequence[Variable], shards: int, partition_nbytes: int, whole: Collection[str]
) -> Iterator[tuple[int, Variable, int, int]]:
    """Yield (shard, variable, start, rows) of each part; the line is cut at the nearest row."""
    total = sum(_elements(variable) for variable in variables)
    shard = position = 0
    for variable in variables:
        start, rows = 0, variable.shape[0] if variable.shape else 1
        if not _elements(variable):
            yield shard, variable, 0, rows
            continue
        is_small = not partition_nbytes or variable.nbytes <= partition_nbytes
        is_whole = is_small or variable.name in whole
        unit = rows if is_whole else 1  # rows that stay together
        size = _elements(variable) // rows * unit  # of these
        while start < rows:
            taken = rows - start
            if shard < shards - 1:
                left = total * (shard + 1) // shards - position
                taken = min(taken, (2 * left + size) // (2 * size) * unit)
            if taken > 0:
                yield shard, variable, start, taken
                start += taken
                position += taken // unit * size
            else:
                shard += 1


def _elements(variable: Variable) -> int:
    return Slice(variable, 0, variable.shape[0] if variable.shape else 1, 0).size


def _cut(variable: Variable, shards: int, partition_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, rows) of each part; the first parts hold the rows that do not divide evenly."""
    if not variable.shape:
        yield 0, 1
        return
    rows = variable.shape[0]
    wanted = -(-variable.nbytes // partition_nbytes) if partition_nbytes else 1
    parts = max(1, min(rows, shards, wanted))
    base, extra = divmod(rows, parts)
    start = 0
    for part in range(parts):
        length = base + 1 if part < extra else base
        yield start, length
        start += length
