"""Which ps holds which rows: a pure function of the variables, equal on every task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from zmqtrain.store.layout import ALIGNMENT, ShardLayout, Slice, Variable

Strategy: TypeAlias = Literal["round-robin", "greedy"]

PARTITION_NBYTES = 256 * 1024


def place(
    variables: Sequence[Variable],
    shards: int,
    strategy: Strategy = "greedy",
    partition_nbytes: int = PARTITION_NBYTES,
) -> tuple[ShardLayout, ...]:
    """Return the layout of each shard; together they hold every element exactly once.

    A variable is cut along axis 0 into ``ceil(nbytes / partition_nbytes)`` parts, but no more than
    it has rows or there are shards (TensorFlow's ``min_max_variable_partitioner``); 0 turns cutting
    off. The parts are placed one by one in creation order, state after what is trained:
    ``round-robin`` gives each to the shard after the last one's, ``greedy`` to the shard with the
    fewest bytes, the lowest index on ties (TensorFlow's ``GreedyLoadBalancingStrategy``). With
    fewer parts than shards some stay empty.
    """
    slices: list[list[Slice]] = [[] for _ in range(shards)]
    sizes = [0] * shards
    turn = 0
    for variable in sorted(variables, key=lambda variable: variable.place):
        for start, rows in _cut(variable, shards, partition_nbytes):
            shard = turn % shards if strategy == "round-robin" else sizes.index(min(sizes))
            end = slices[shard][-1].end if slices[shard] else 0
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            cut = Slice(variable, start, rows, offset)
            slices[shard].append(cut)
            sizes[shard] += cut.size
            turn += 1
    return tuple(ShardLayout(shard, tuple(cuts)) for shard, cuts in enumerate(slices))


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
