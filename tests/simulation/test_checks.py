"""The checks of a simulated run find a mistake of each kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

from simulation import run as running
from simulation.faults import Fault, Weather
from simulation.run import simulate
from tests.constants import Constants
from tests.traces import calm
from zmqtrain.actors.actor import Request
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.worker_watch import WorkerWatch
from zmqtrain.errors import PeerLostError
from zmqtrain.policies import Release
from zmqtrain.policies.bounded_staleness import BoundedStaleness
from zmqtrain.protocol.orders import Apply, Order, Reduce
from zmqtrain.server.receiver import Receiver
from zmqtrain.server.state import Result, ShardState
from zmqtrain.store.shard import Shard
from zmqtrain.training.model_runner import ModelRunner

Spoil = Callable[..., None]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Have a method do something else: ``instead(original, *arguments)``, at one call or at all."""

    def spoil(owner: type, name: str, instead: Callable[..., Any], call: int = 0) -> None:
        original, calls = getattr(owner, name), count(1)

        def method(*arguments: Any, **named: Any) -> Any:
            is_spoilt = next(calls) == call or not call
            given = partial(instead, original) if is_spoilt else original
            return given(*arguments, **named)

        monkeypatch.setattr(owner, name, method)

    return spoil


def test_calm_run_breaks_no_invariant() -> None:
    assert simulate(calm(policy="hogwild")).broken == ""


def test_update_that_is_made_twice_is_found(spoil: Spoil) -> None:
    def twice(carry_out: Any, *arguments: Any) -> Any:
        carry_out(*arguments)
        return carry_out(*arguments)

    spoil(Shard, "carry_out", twice, call=5)
    broken = simulate(calm(ps=1, policy="hogwild")).broken
    assert "ps 0 ends at version 11, not 10" in broken
    assert "counts 2.0 times on ps 0" in broken


def test_update_that_is_lost_is_found(spoil: Spoil) -> None:
    spoil(Shard, "carry_out", lambda *_: "applied", call=5)
    broken = simulate(calm(ps=1, policy="hogwild")).broken
    assert "ps 0 has learned 9 examples, 10 are counted" in broken


def test_sum_in_another_order_is_found_in_the_last_bit(spoil: Spoil) -> None:
    def reverse(carry_out: Any, shard: Shard, order: Order, number: int = 0) -> Any:
        is_sum = isinstance(order, Reduce)
        return carry_out(shard, Reduce(order.workers[::-1]) if is_sum else order, number)

    spoil(Shard, "carry_out", reverse)
    broken = simulate(calm(policy="sync-replicas", workers=6)).broken
    assert "trail0 is not, to the last bit, what an undisturbed run makes of it" in broken
    assert "learned" not in broken


@pytest.mark.parametrize("policy", ["sync-replicas", "hogwild"])
@pytest.mark.parametrize("tables", [False, True], ids=["", "tables"])
def test_evaluation_of_other_parameters_is_found(policy: str, tables: bool, spoil: Spoil) -> None:
    spoil(Shard, "copy", lambda copy, *given, **named: copy(*given, **named) + 1)
    broken = simulate(calm(ps=2, policy=policy, evaluates=5, tables=tables)).broken
    assert "the evaluation of step 5 is of shards with" in broken


def test_batch_that_is_never_leased_is_found(spoil: Spoil) -> None:
    def skip(lease: Any, ledger: Ledger, worker: int) -> int:
        ledger.next_batch += 1
        return int(lease(ledger, worker))

    spoil(Ledger, "lease", skip, call=5)
    broken = simulate(calm(policy="hogwild", prefetch=0)).broken
    assert "ps 0 has learned 10 examples, 11 are counted" in broken


def test_dropped_push_that_is_called_applied_is_found(spoil: Spoil) -> None:
    def lie(decided: Any, state: ShardState, worker: int, result: Result, reason: str = "") -> Any:
        return decided(state, worker, "applied" if result == "dropped" else result, reason)

    spoil(ShardState, "decided", lie)
    broken = simulate(calm(policy="sync-replicas:aggregate=1", slow=0)).broken
    assert "were acknowledged and are not counted" in broken


def test_worker_that_is_too_far_ahead_is_found(spoil: Spoil) -> None:
    def generous(push: Any, policy: BoundedStaleness, worker: int) -> Any:
        decisions = push(policy, worker)
        if worker not in policy.waiting:
            return decisions
        policy.waiting.remove(worker)
        return [*decisions, Release(worker)]

    spoil(BoundedStaleness, "push", generous)
    broken = simulate(calm(policy="bounded-staleness:0", slow=0)).broken
    assert "compute with clocks" in broken


def test_hang_is_found_with_the_waiting_tasks(spoil: Spoil, constants: Constants) -> None:
    constants(running, PATIENCE_S=40.0)
    spoil(Coordinator, "_left", lambda *_: [])
    spoil(WorkerWatch, "check", lambda *_: None)
    kill = Fault(0.5, "kill", ("worker 1",), 10.0)
    broken = simulate(calm(policy="sync-replicas", ps=1, workers=2, faults=(kill,))).broken
    assert broken.startswith("the run has not ended after")
    assert re.search("worker 0 has waited .* s for ps 0: it has not answered push", broken)


def test_push_that_comes_twice_and_counts_twice_is_found(spoil: Spoil) -> None:
    states: dict[Receiver, ShardState] = {}

    def built(init: Any, receiver: Receiver, actor: Any, state: ShardState, *others: Any) -> None:
        states[receiver] = state
        init(receiver, actor, state, *others)

    def forgetful(take_in: Any, receiver: Receiver, request: Request, message: Any) -> Any:
        state = states[receiver]
        before, entered = state.duplicates, take_in(receiver, request, message)
        if state.duplicates > before:
            state.shard.carry_out(Apply(request.envelope.sender.index), 0)
        return entered

    spoil(Receiver, "__init__", built)
    spoil(Receiver, "take_in", forgetful)
    weather = Weather(0.001, 0.02, repetition=0.7)
    broken = simulate(calm(policy="hogwild", ps=2, steps=24, weather=weather)).broken
    assert re.search("ps [01] ends at version|counts 2.0 times", broken)


def test_error_that_names_no_task_is_found(spoil: Spoil) -> None:
    def fail(*_: Any) -> None:
        raise PeerLostError("something is lost")

    spoil(ModelRunner, "compute", fail, call=5)
    broken = simulate(calm(policy="hogwild")).broken
    assert "something is lost" in broken
    assert "the text names no task" in broken


def test_unexpected_exception_is_found(spoil: Spoil) -> None:
    spoil(Receiver, "take_in", lambda *_: 1 // 0, call=5)
    assert "ZeroDivisionError" in simulate(calm(policy="hogwild")).broken
