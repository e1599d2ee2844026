"""Shards whose group is over: they carry out what they lack, and write what falls to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from zmqtrain.coordination.hand_over import left_of
from zmqtrain.errors import CheckpointError
from zmqtrain.optim import Momentum, Update
from zmqtrain.protocol.checkpoint import LastOrders, LedgerState, Saved
from zmqtrain.protocol.orders import Accumulate, Answer, Apply, Rate, Reduce
from zmqtrain.server.orphaned_shard import OrphanedShard
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place, with_copies
from zmqtrain.store.segment import Segment
from zmqtrain.store.shard import Shard, segment_layout

LAYOUTS = with_copies(place([Variable("w", (12,))], 2, "contiguous", 4), 2)
ORDERS = (Reduce((0, 1)), Answer(0, 1, 1), Accumulate(0), Rate(0.5), Reduce((1,)), Apply(0))
LAST = LastOrders(1, 1, ORDERS, Saved(3, "sync-replicas", LedgerState(0, (), 0)))


def remains(index: int, done: int, *, is_leader: bool = False) -> OrphanedShard:
    """Return what is left of a shard with all of the model, after so many orders.

    That of the leader's host has given itself the others, by numbers of its own.
    """
    update = Update(Momentum(1.0, 0.9))
    segment = Segment.private(segment_layout(LAYOUTS[index], update))
    shard = Shard(LAYOUTS[index], update, segment, safe=True)
    shard.initialize(np.zeros(LAYOUTS[index].size, np.float32))
    for worker in (0, 1):
        segment.gradient(worker)[:] = worker + 1
        shard.stage(worker, worker, 1)
    for number, order in enumerate(ORDERS[:done], 1):
        shard.carry_out(order, number)
    if is_leader:
        return OrphanedShard(shard, LAST, LAST.end, [*enumerate(ORDERS[done:], 40)])
    return OrphanedShard(shard, LAST, done)


def written(directory: Path, left: OrphanedShard, index: int) -> dict[str, bytes]:
    directory.mkdir()
    layouts = left_of(LAYOUTS, (index,)) or {}
    file = left.write(directory, layouts[index], LAST)
    assert (file.shard, file.version) == (0, 3)
    tensors = load_file(directory / file.file)
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("done", range(len(ORDERS) + 1))
def test_remaining_shard_writes_the_same_from_any_order_on(tmp_path: Path, done: int) -> None:
    first = written(tmp_path / "0", remains(0, len(ORDERS)), 0)
    assert written(tmp_path / "1", remains(1, done), 1) == first
    assert {name.partition("/")[0] for name in first} == {"parameters", "momentum"}


def test_host_of_the_leader_first_carries_out_what_it_has_ordered_itself(tmp_path: Path) -> None:
    expected = written(tmp_path / "0", remains(0, len(ORDERS)), 0)
    assert written(tmp_path / "1", remains(1, 2, is_leader=True), 1) == expected


def test_second_request_writes_the_same(tmp_path: Path) -> None:
    left = remains(0, 2)
    first = written(tmp_path / "first", left, 0)
    assert written(tmp_path / "again", left, 0) == first


def test_shard_that_comes_to_another_version_is_not_written(tmp_path: Path) -> None:
    left = remains(0, 0)
    other = LastOrders(1, 1, ORDERS, Saved(4, "sync-replicas", LedgerState(0, (), 0)))
    with pytest.raises(CheckpointError, match=r"order 6 .* at version 3; expected version 4"):
        left.write(tmp_path, LAYOUTS[0], other)
    assert not list(tmp_path.iterdir())


def test_order_about_a_gradient_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    left = remains(0, 0)
    other = LastOrders(1, 1, (Reduce((0, 7)),), LAST.saved)
    with pytest.raises(CheckpointError, match="order 1 needs a gradient of worker 7"):
        left.write(tmp_path, LAYOUTS[0], other)
