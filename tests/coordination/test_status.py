"""Status of silent tasks, and of those that wait for them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.coordination.parts import TIMING, add_peer, begun_leader, host, make_leader
from zmqtrain.coordination.endings import completion
from zmqtrain.coordination.events import PullArrived, PushArrived, PushesReported
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.peers import A_WORKER, PeerTable, names_of
from zmqtrain.coordination.status import status_of
from zmqtrain.job_checks import ENDLESS
from zmqtrain.protocol.status import Status, TableStatus, Wait, of_all_shards
from zmqtrain.store.model_tables import MAX_TABLES
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import Arrived, ShardReport

SILENT_S = 2.7


@pytest.fixture
def status() -> Status:
    """Ps 1 is stopped; worker 0 waits for both ps, worker 1 computes."""
    peers = PeerTable(5.0, 2, lambda peer: False)
    shard = add_peer(peers, "ps 1")
    waits = tuple(
        Wait("worker 0", peer, "it has not answered push 3", SILENT_S) for peer in ("ps 0", "ps 1")
    )
    add_peer(peers, "worker 0", pushes=3, waits=waits)
    passing = (Wait("worker 1", "ps 0", "it has not answered push 3", 0.01),)
    add_peer(peers, "worker 1", pushes=3, waits=passing)
    leader = begun_leader(shards=2, peers=peers)
    for worker in (0, 1):
        leader.arrived(PullArrived(worker))
    leader.figures.applied(leader.coordinator, 4, {0: 0, 1: 2}, 1.0)
    leader.figures.applied(leader.coordinator, 5, {0: 1}, 2.0)
    shard.report = ShardReport(0, 7, 24)
    shard.heard_at = time.monotonic() - SILENT_S
    return status_of(leader, host(), event=0, save_wanted=False, stop_wanted=False)


def test_task_that_misses_some_heartbeats_is_silent(status: Status) -> None:
    assert {task.task: task.state for task in status.tasks} == {
        "ps 0": "serving",
        "ps 1": "silent",
        "worker 0": "waiting",
        "worker 1": "computing",
    }


def test_staleness_is_that_of_all_gradients_and_of_each_worker(status: Status) -> None:
    workers = {task.task: task.staleness for task in status.tasks if task.role == "worker"}
    assert workers == {"worker 0": 0.5, "worker 1": 2.0}
    assert (status.staleness["mean"], status.staleness["max"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("uncounted", "reason"), [(0, "the first epoch has not begun"), (4, "the epoch is over")]
)
def test_worker_that_waits_for_an_epoch_is_told_which(uncounted: int, reason: str) -> None:
    leader = make_leader()
    leader.begin(1, 0, Ledger(next_batch=uncounted, limit=uncounted))
    leader.joined(add_peer(leader.peers, "worker 0"))
    leader.arrived(PullArrived(0))
    found = status_of(leader, host(), event=0, save_wanted=False, stop_wanted=False)
    assert reason in [wait.reason for wait in found.waits if wait.owner == "worker 0"]


def test_wait_for_a_silent_task_ends_when_that_is_given_up(status: Status) -> None:
    left = {(wait.owner, wait.peer): wait.until_s for wait in status.waits}
    assert left["worker 0", "ps 0"] is None
    assert left["worker 0", "ps 1"] == pytest.approx(TIMING.peer_timeout_s - SILENT_S, abs=2.0)


def test_status_of_a_ps_is_its_last_report(status: Status) -> None:
    (shard,) = (task for task in status.tasks if task.task == "ps 1")
    assert (shard.step, shard.nbytes) == (7, 24)


def test_wait_for_silent_workers_ends_with_their_leases() -> None:
    leader = begun_leader(workers=(0, 1), policy="sync-replicas")
    (silent,) = (peer for peer in leader.peers if str(peer) == "worker 1")
    silent.heard_at = time.monotonic() - 3.0
    leader.arrived(PushArrived(0, 1, 0, 1))
    (wait,) = status_of(leader, host(), event=0, save_wanted=False, stop_wanted=False).waits
    assert (wait.owner, wait.peer) == ("worker 0", "worker 1")
    assert wait.until_s == pytest.approx(TIMING.lease_s - 3.0, abs=1.5)


async def test_wait_for_a_push_names_the_ps_that_lacks_it() -> None:
    """Ps 1 is silent: it has the push of worker 1, but not that of worker 0."""
    leader = begun_leader(workers=(0, 1), policy="sync-replicas", shards=2)
    silent = add_peer(leader.peers, "ps 1")
    leader.arrived(PushArrived(1, 1, 1, 1))
    leader.event(PushesReported(1, Arrived((1,), (1,), (1,), (True,))))
    leader.arrived(PushArrived(0, 1, 0, 1))
    silent.heard_at = time.monotonic() - SILENT_S
    (wait,) = status_of(leader, host(), event=0, save_wanted=False, stop_wanted=False).waits
    assert (wait.owner, wait.peer) == ("worker 1", "ps 1")
    assert wait.reason.endswith("the push of worker 0 has not arrived everywhere")
    assert wait.until_s == pytest.approx(TIMING.peer_timeout_s - SILENT_S, abs=2.0)


def test_job_without_a_worker_waits_for_one_until_it_gives_up() -> None:
    leader = begun_leader()
    (wait,) = status_of(leader, host(), event=0, save_wanted=False, stop_wanted=False).waits
    assert wait.peer == A_WORKER
    assert wait.until_s == pytest.approx(TIMING.join_timeout_s, abs=1.5)


@pytest.mark.parametrize(
    ("workers", "first", "names"),
    [
        ((), (), ""),
        ((0, 1, 2), (), "worker 0, worker 1, worker 2"),
        ((0, 1, 2, 3), (), "worker 0, worker 1, worker 2, and 1 more"),
        (tuple(range(1000)), (7, 3), "worker 7, worker 3, worker 0, and 997 more"),
        ((0, 1, 2, 3, 4), (4, 3, 2, 1), "worker 4, worker 3, worker 2, and 2 more"),
        ((0, 1), (5,), "worker 0, worker 1"),
    ],
)
def test_three_workers_are_named_and_the_others_counted(
    workers: tuple[int, ...], first: tuple[int, ...], names: str
) -> None:
    assert names_of(workers, first) == names


@pytest.mark.parametrize(
    ("step", "steps", "text"),
    [
        (9, 9, "step 9 of 9 is done"),
        (9, 5, "step 9 was reached before, and 5 are asked for: raise --steps"),
        (9, ENDLESS, "it was ended at step 9"),
    ],
)
def test_completed_job_has_a_reason(step: int, steps: int, text: str) -> None:
    assert completion(step, steps) == text


def test_tables_of_all_shards_are_added_up() -> None:
    shards = (
        {"user": TableStatus(None, 3, 100, 9, 1, 10, 2, hottest=((7, 5), (1, 3)))},
        {"user": TableStatus(None, 4, 200, 9, 2, 20, 1, hottest=((-2, 9), (4, 3)))},
    )
    expected = TableStatus(None, 7, 300, 9, 3, 30, 3, ((-2, 9), (7, 5), (1, 3), (4, 3)))
    assert of_all_shards(shards, 1) == {"user": expected}


def test_rows_with_copies_count_once_in_the_tables_of_all_shards() -> None:
    shards = [
        {"user": TableStatus(None, 6, 100, 9, 2, 20, 2, hottest=((7, 5), (1, 3)))},
        {"user": TableStatus(None, 6, 200, 9, 2, 20, 4, hottest=((7, 6), (1, 2)))},
    ]
    expected = TableStatus(None, 6, 300, 9, 2, 20, 3, ((7, 6), (1, 3)))
    assert of_all_shards(shards, 2) == {"user": expected}


def test_status_of_as_many_tables_as_there_may_be_fits_into_a_message(status: Status) -> None:
    hottest = tuple((-(2**63) + n, 2**40) for n in range(10))
    full = TableStatus(2**62, *[2**60] * 6)
    tables = {f"{n:0100}": replace(full, hottest=hottest * (n < 32)) for n in range(MAX_TABLES)}
    message = replace(status, tables=tables)
    frames = encode(Envelope(message, Sender("ps", 0), 1))
    assert decode(frames).message.tables == tables
