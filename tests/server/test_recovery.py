"""Workers' records in the segment, as a ps's next life finds them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.coordination.parts import add_peer
from tests.server.conftest import SIZE, make_state
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.protocol.orders import Accumulate, Answer, Apply, Order, Reduce
from zmqtrain.server.state import Pending, ShardState, WorkerRecord, recover
from zmqtrain.store.journal import MAX_MARK_NBYTES
from zmqtrain.store.shard import Shard
from zmqtrain.wire.messages import Pull, PullReply, Push, PushReply

PUSH = Push(2, 1, 5, 32, 0.5)


@pytest.fixture
def state(peers: PeerTable) -> ShardState:
    """Return a shard that survives its process, and worker 0 in it."""
    state = make_state(safe=True)
    state.join(add_peer(peers, "worker 0"))
    return state


def next_life(state: ShardState) -> tuple[ShardState, PeerTable]:
    shard, peers = state.shard, PeerTable(5.0, 2, lambda peer: False)
    again = Shard(shard.layout, shard.update, shard.segment, safe=True)
    after = ShardState(state.task, again)
    recover(after, peers)
    return after, peers


def known(worker: WorkerRecord) -> tuple[object, ...]:
    pending = worker.pending
    request = (pending.message, pending.result, pending.reason) if pending is not None else None
    return worker.incarnation, worker.lane, worker.buffer, worker.reply, worker.early, request


@pytest.mark.parametrize(
    ("pending", "reply", "early"),
    [
        (None, None, None),
        (Pending(Pull(), None), None, Answer(0, 1)),
        (None, PullReply(3, (4, 5)), None),
        (Pending(PUSH, None, "accumulated"), None, None),
        (Pending(PUSH, None, "dropped", "it was late"), None, None),
        (None, PushReply(2, "refused", 7, (), True, "NaN", 0.25), Answer(0, 1, 3)),
    ],
    ids=["joined", "pulled", "began", "accumulated", "dropped", "told to stop"],
)
def test_worker_is_as_it_was(
    state: ShardState,
    pending: Pending | None,
    reply: PullReply | PushReply | None,
    early: Answer | None,
) -> None:
    worker = state.workers[0]
    worker.lane, worker.buffer = "shm", 1
    worker.pending, worker.reply, worker.early = pending, reply, early
    state.keep(worker)
    after, peers = next_life(state)
    assert known(after.workers[0]) == known(worker)
    assert [(str(peer), peer.incarnation, peer.pushes) for peer in peers] == [
        ("worker 0", 1, worker.received)
    ]


@pytest.mark.parametrize(
    ("order", "result"), [(Apply(0), "applied"), (Accumulate(0), "accumulated")]
)
def test_push_whose_update_was_made_is_known_as_such_though_its_mark_was_not_written(
    state: ShardState, order: Order, result: str
) -> None:
    worker = state.workers[0]
    worker.buffer = 0
    state.shard.segment.gradient(0)[:] = 1
    state.shard.stage(0, 0, PUSH.sequence, PUSH.examples)
    worker.pending = Pending(PUSH, None)
    state.keep(worker)
    state.shard.carry_out(order)
    after, _ = next_life(state)
    assert after.workers[0].pending is not None
    assert after.workers[0].pending.result == result


def test_push_of_a_new_life_is_not_taken_for_that_of_the_life_before(
    state: ShardState, peers: PeerTable
) -> None:
    state.shard.segment.gradient(1)[:] = 1
    state.shard.stage(0, 0, PUSH.sequence, PUSH.examples)
    state.shard.carry_out(Apply(0))
    state.leave(0)
    state.join(add_peer(peers, "worker 0"))
    worker = state.workers[0]
    worker.buffer, worker.pending = 1, Pending(PUSH, None)
    state.shard.stage(0, 1, PUSH.sequence, PUSH.examples)
    state.keep(worker)
    after, _ = next_life(state)
    assert after.workers[0].pending is not None
    assert after.workers[0].pending.result is None


@pytest.mark.parametrize("has_left", [True, False], ids=["left", "says too much to be kept"])
def test_gradient_of_a_worker_that_is_not_known_any_more_still_lies_there(
    state: ShardState, has_left: bool
) -> None:
    state.shard.segment.gradient(0)[:] = 1
    state.shard.stage(0, 0, 1)
    if has_left:
        state.leave(0)
    else:
        state.workers[0].reply = PushReply(1, "dropped", 0, reason="x" * MAX_MARK_NBYTES)
        state.keep(state.workers[0])
    after, peers = next_life(state)
    assert (after.workers, list(peers)) == ({}, [])
    after.shard.carry_out(Reduce((0,)))
    assert np.array_equal(after.shard.parameters, np.full(SIZE, -1, np.float32))
