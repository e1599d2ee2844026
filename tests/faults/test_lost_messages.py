"""Single messages that are lost or late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simulation.faults import Fault
from simulation.rules import Rule, drop, refuse
from simulation.run import simulate
from tests.traces import calm, held, trace_of
from zmqtrain.errors import ExitCode
from zmqtrain.protocol.checkpoint import Saved
from zmqtrain.protocol.orders import Answer
from zmqtrain.store import checkpoint
from zmqtrain.wire.control import ShardWritten, Shutdown
from zmqtrain.wire.messages import Orders, Pull, Push


@pytest.mark.parametrize("fate", [drop, refuse], ids=["lost", "refused"])
def test_lost_or_refused_report_of_a_written_slice_is_sent_again(fate: Callable[..., Rule]) -> None:
    """A ps that is about to join the leader again has its report refused."""
    report = held(calm(ps=2, keeps=True, save_secs=1000.0, rules=(fate(ShardWritten, 1),)))
    assert report.matched == (2,)


def test_checkpoint_is_written_once_although_its_reply_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, written = checkpoint.copy_tensors, []

    def count(*arguments: Any) -> checkpoint.ShardCopy:
        written.append(arguments)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "copy_tensors", count)
    report = held(calm(ps=2, keeps=True, save_secs=1000.0, rules=(drop(Saved, 1),)))
    assert report.matched == (2,)
    assert len(written) == 2


def stops(orders: Orders) -> bool:
    return any(isinstance(order, Answer) and order.stop for order in orders.orders)


def test_last_orders_that_are_lost_again_and_again_are_waited_for() -> None:
    lost = drop(Orders, *range(1, 7), where=stops)
    assert held(calm(ps=2, rules=(lost,))).matched > (6,)


def test_push_that_is_lost_again_and_again_is_waited_for_at_the_end() -> None:
    lost = drop(Push, *range(1, 13), receiver="ps 1", where=lambda push: push.sequence == 4)
    report = held(calm(ps=2, policy="hogwild", workers=1, steps=4, rules=(lost,)))
    assert report.matched > (12,)


def test_push_that_some_shard_never_got_is_not_waited_for() -> None:
    """Its worker has died; the others tell that all of theirs have been answered."""
    lost = drop(Push, sender="worker 1", receiver="ps 1")
    kill = Fault(1.2, "kill", ("worker 1",), 1000.0)
    trace = trace_of(calm(ps=2, policy="hogwild", faults=(kill,), rules=(lost,)))
    assert trace.of(r"chief 0 says: the shards end at versions \[10, 9\], not all at step 10")


def test_order_to_end_that_is_lost_is_given_to_workers_again() -> None:
    trace = trace_of(calm(ps=1, rules=(drop(Shutdown, 1, 2, 3, receiver="worker"),)))
    assert len(trace.of("worker . ended: exit code 0")) == 3


def test_order_to_end_that_is_lost_is_given_to_the_ps_again() -> None:
    trace = trace_of(calm(ps=1, rules=(drop(Shutdown, 1, receiver="ps 0"),)))
    assert trace.of("ps 0 ended: exit code 0")
    assert trace.of("it has not confirmed the end") == []


def test_ps_restarted_while_the_chief_begins_ends_no_job() -> None:
    for lines in range(1, 120, 10):
        kill = Fault(0.0015, "kill", ("ps 1",), 0.1, lines=lines)
        held(calm(ps=2, lane="shm", steps=4, faults=(kill,)))


@pytest.mark.parametrize("policy", ["sync-replicas", "bounded-staleness:0", "hogwild:whole"])
def test_pull_that_was_released_before_it_came_is_answered_by_the_next_life(policy: str) -> None:
    """A pull needs no agreement: ps 0 has it released on a shard that it has not reached yet."""
    lost = drop(Pull, receiver="ps 1", until_s=1.0)
    kill = Fault(1.0, "kill", ("ps 1",), 0.3)
    held(calm(ps=2, lane="shm", policy=policy, faults=(kill,), rules=(lost,)))


def test_worker_whose_lease_ran_out_gets_the_shutdown() -> None:
    stop = Fault(0.5, "stop", ("worker 0",), 20.0)
    cut = Fault(0.5, "cut", ("worker 0",), 20.1, mild=True)
    trace = trace_of(calm(ps=1, policy="hogwild", faults=(stop, cut)))
    assert trace.of("ps 0 says: worker 0 has been silent for .*: it has left")
    assert trace.of("worker 0 ended: exit code 0")


def test_worker_that_never_comes_is_waited_for_as_long_as_others_are() -> None:
    """The others could not know how long a step of it takes."""
    text = "worker 0 has waited 20 s for worker 1: 1 of 2 workers have joined; start it, or raise "
    broken = simulate(calm(ps=1, workers=2, absent=frozenset({"worker 1"}))).broken
    assert broken == f"the run ended with exit code {ExitCode.PEER_LOST:d}: {text}--join-timeout-s"


def test_ps_that_gives_up_leaves_nothing_for_a_next_life() -> None:
    lines: list[str] = []
    simulate(
        calm(ps=1, lane="shm", faults=(Fault(0.5, "kill", ("chief 0",), 1000.0),)), lines.append
    )
    trace = "\n".join(lines)
    assert "ps 0 ended: OrphanedError" in trace
    assert "memory kept in" not in trace


def test_tasks_that_need_a_ps_which_never_comes_back_end_in_time() -> None:
    lines: list[str] = []
    patience = {"join_timeout_s": 5.0, "peer_timeout_s": 3.0}
    timing = calm().timing.model_copy(update=patience)
    kill = Fault(0.5, "kill", ("ps 1",), 200.0)
    simulate(calm(ps=2, workers=2, lane="shm", timing=timing, faults=(kill,)), lines.append)
    for name in ("worker 0", "worker 1", "chief 0"):
        assert any(
            f" {name} ended: PeerLostError (ps 1 at ipc://simulated/1 has been silent" in line
            for line in lines
        )
    assert any(" ps 0 ended: OrphanedError" in line for line in lines)


def test_steps_of_live_workers_may_take_longer_than_others_are_waited_for() -> None:
    timing = calm().timing.model_copy(update={"join_timeout_s": 0.2})
    trace = trace_of(calm(ps=1, steps=8, workers=2, slow=0, timing=timing))
    assert trace.of("worker 1 has waited 0.2 s for worker 0")
