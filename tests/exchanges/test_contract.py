"""Contract of every exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.exchanges.conftest import OpenExchange
from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.exchanges.board import BoardExchange
from zmqtrain.exchanges.local import LocalExchange
from zmqtrain.optim import SGD
from zmqtrain.training.exchange import Exchange, Membership, StepReport, StepResult

RATE = 0.5
POLICIES = ["hogwild", "bounded-staleness:1", "sync-replicas"]


A, B = np.arange(8, dtype=np.float32).reshape(4, 2), np.full(3, -1, np.float32)


class Two:
    """Two variables, one of which may be cut in two."""

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"a": A, "b": B}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        raise AssertionError("an exchange computes nothing")

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {}


def make_job(**fields: Any) -> Job:
    rows = np.zeros((12, 1), np.float32)
    defaults = {"batch_size": 3, "steps": 4, "partition_nbytes": 16}
    return Job(model=Two(), data=Arrays((rows,), (rows,)), optimizer=SGD(RATE), **defaults | fields)


def values(membership: Membership) -> NDArray[np.float32]:
    """Return the parameters in the order of the shards, copied."""
    return np.concatenate(membership.parameters)


async def push(
    exchange: Exchange,
    membership: Membership,
    batch: int,
    gradient: float,
    absent: frozenset[str] = frozenset(),
) -> StepResult:
    """Make one step whose gradient is the same for every element."""
    exchange.begin()
    for flat in membership.gradients:
        flat[...] = gradient
    finite = bool(np.isfinite(gradient))
    return await exchange.finish(StepReport(batch, 3, 0.5, finite, absent=absent))


async def test_worker_that_joins_finds_the_initial_parameters_and_batches(
    open_exchange: OpenExchange,
) -> None:
    job = make_job(prefetch=2)
    async with open_exchange(job) as exchange:
        membership = await exchange.join()
        assert membership.batches == (0, 1, 2)
        assert not membership.stop
        initial = job.initial_parameters()
        for layout, flat in zip(membership.layouts, membership.parameters, strict=True):
            assert flat.shape == (layout.size,)
            for cut in layout.slices:
                np.testing.assert_array_equal(cut.value(flat), cut.of(initial[cut.variable.name]))
        assert [flat.shape for flat in membership.gradients] == [
            flat.shape for flat in membership.parameters
        ]


@pytest.mark.parametrize("policy", POLICIES)
async def test_step_updates_the_parameters_before_it_ends(
    open_exchange: OpenExchange, policy: str
) -> None:
    async with open_exchange(make_job(policy=policy)) as exchange:
        membership = await exchange.join()
        before = values(membership)
        result = await push(exchange, membership, 0, 1.0)
        assert result.result == "applied"
        np.testing.assert_array_equal(values(membership), before - RATE)
        by_itself = BoardExchange if policy == "sync-replicas" else LocalExchange
        assert (result.update_s > 0) == isinstance(exchange, (LocalExchange, by_itself))
        await push(exchange, membership, 1, -1.0)
        np.testing.assert_array_equal(values(membership), before)


@pytest.mark.parametrize("policy", POLICIES)
async def test_variable_without_a_gradient_is_left_alone_in_this_step_only(
    open_exchange: OpenExchange, policy: str
) -> None:
    async with open_exchange(make_job(policy=policy, l2=0.25)) as exchange:
        membership = await exchange.join()
        layouts, initial = membership.layouts, values(membership)
        of_b = np.concatenate([layout.flat_of({"a": A * 0, "b": B * 0 + 1}) for layout in layouts])
        await push(exchange, membership, 0, 1.0, frozenset({"a"}))
        expected = initial - of_b * RATE * (1 + 0.25 * initial)
        np.testing.assert_array_equal(values(membership), expected)
        await push(exchange, membership, 1, 1.0)
        np.testing.assert_array_equal(values(membership), expected - RATE * (1 + 0.25 * expected))


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_batch_up_to_the_last_step_is_given_once(
    open_exchange: OpenExchange, policy: str
) -> None:
    async with open_exchange(make_job(policy=policy, steps=6)) as exchange:
        membership = await exchange.join()
        batches, done, stop = list(membership.batches), 0, membership.stop
        while not stop:
            result = await push(exchange, membership, batches[done], 1.0)
            batches += result.batches
            done, stop = done + 1, result.stop
        assert batches[:done] == list(range(6))


@pytest.mark.parametrize("inner_state", ["fresh", "keep"])
async def test_last_answer_has_the_parameters_to_which_a_kept_state_belongs(
    open_exchange: OpenExchange, inner_state: str, tmp_path: Path
) -> None:
    job = make_job(policy="local-steps:4", inner_state=inner_state, logdir=str(tmp_path))
    async with open_exchange(job) as exchange:
        membership = await exchange.join()
        exchange.begin()
        for flat in membership.gradients:
            flat[...] = 7
        result = await exchange.finish(StepReport(0, 12, 0.5, True, batches=4))
        have_come = set(values(membership)) <= {0, 7}
        assert have_come or inner_state == "fresh"
        assert (result.stop, result.step) == (True, 4 if have_come else None)


async def test_rest_of_a_compressed_gradient_is_not_added_to_a_difference(
    open_exchange: OpenExchange,
) -> None:
    job = make_job(policy="local-steps:1,after=1", compression="topk:ratio=0.25")
    async with open_exchange(job) as exchange:
        membership = await exchange.join()
        exchange.begin()
        for flat in membership.gradients:
            flat[...] = np.arange(len(flat))
        result = await exchange.finish(StepReport(0, 3, 0.5, True))
        assert result.round is not None
        before = values(membership)
        await push(exchange, membership, 1, 0.0)
        np.testing.assert_array_equal(values(membership), before)


async def test_gradients_are_averaged_where_the_policy_says_so(open_exchange: OpenExchange) -> None:
    async with open_exchange(make_job(policy="sync-replicas:aggregate=2")) as exchange:
        membership = await exchange.join()
        before = values(membership)
        assert (await push(exchange, membership, 0, 1.0)).result == "accumulated"
        np.testing.assert_array_equal(values(membership), before)
        assert (await push(exchange, membership, 1, 3.0)).result == "applied"
        np.testing.assert_array_equal(values(membership), before - 2 * RATE)


async def test_gradient_that_is_not_finite_is_refused_and_changes_nothing(
    open_exchange: OpenExchange,
) -> None:
    async with open_exchange(make_job(prefetch=0)) as exchange:
        membership = await exchange.join()
        before = values(membership)
        result = await push(exchange, membership, 0, np.nan)
        assert (result.result, result.stop) == ("refused", False)
        assert "NaN" in result.reason
        np.testing.assert_array_equal(values(membership), before)
        assert result.batches == (1,)
        assert (await push(exchange, membership, 1, 1.0)).result == "applied"


async def test_job_that_meets_too_many_such_gradients_is_over(open_exchange: OpenExchange) -> None:
    async with open_exchange(make_job(max_nonfinite=1)) as exchange:
        membership = await exchange.join()
        batches = list(membership.batches)
        for _ in range(3):  # over ps the word may come one step later
            result = await push(exchange, membership, batches.pop(0), np.inf)
            batches += result.batches
            if result.stop:
                break
        assert result.stop


async def test_gradient_that_was_told_of_while_it_was_computed_counts_once(
    open_exchange: OpenExchange,
) -> None:
    async with open_exchange(make_job(overlap=True)) as exchange:
        membership = await exchange.join()
        before = values(membership)
        exchange.begin()
        for flat in membership.gradients:
            flat[...] = 1.0
        exchange.written(["b"])
        exchange.written(["a"])
        result = await exchange.finish(StepReport(0, 3, 0.5, finite=True))
        assert result.result == "applied"
        np.testing.assert_array_equal(values(membership), before - RATE)
