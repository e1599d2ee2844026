"""The training loop over an exchange that a test directs: no cluster, no messages."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.plans import planned
from zmqtrain import Job
from zmqtrain.data import NoisyLine
from zmqtrain.errors import FencedError, PeerLostError, ProtocolError
from zmqtrain.models import LinearRegression
from zmqtrain.observe.metrics import Metrics
from zmqtrain.optim import SGD
from zmqtrain.training.exchange import Membership, Round, StepReport, StepResult
from zmqtrain.training.loop import TrainingLoop
from zmqtrain.training.step_times import StepTimes, Traced

JOB = Job(
    model=LinearRegression(), data=NoisyLine(examples=20), optimizer=SGD(), batch_size=4, prefetch=2
)
LAYOUTS = planned(JOB).layouts


class Scripted:
    """An exchange that answers steps with the given results in order, or raises given errors."""

    def __init__(
        self,
        *answers: StepResult | Exception,
        batches: tuple[int, ...] = (0,),
        round: Round | None = None,
    ) -> None:
        self._answers, self._batches, self._round = list(answers), batches, round
        self.reports: list[StepReport] = []
        self.gradients: list[list[float]] = []
        self.joins = 0
        self.is_over = False

    async def join(self) -> Membership:
        self.joins += 1
        (layout,) = LAYOUTS
        self._gradient = np.zeros(layout.size, np.float32)
        parameters = np.zeros(layout.size, np.float32)
        given = LAYOUTS, [parameters], [self._gradient], self._batches
        return Membership(*given, round=self._round)

    def begin(self) -> None:
        for cut in LAYOUTS[0].slices:
            cut.run(self._gradient)[...] = np.nan

    def written(self, names: Sequence[str]) -> None:
        raise AssertionError("the job's overlap is off")

    def finish(self, report: StepReport) -> Awaitable[StepResult]:
        self.reports.append(report)
        self.gradients.append(self._gradient.tolist())
        return self._answer(self._answers.pop(0))

    async def wait_for_end(self) -> None:
        self.is_over = True

    def leave(self, reason: str) -> None:
        raise AssertionError("the loop does not leave")

    async def _answer(self, answer: StepResult | Exception) -> StepResult:
        if isinstance(answer, Exception):
            raise answer
        return answer


def train(exchange: Scripted, job: Job = JOB, traced: Traced | None = None) -> Metrics:
    """Run a training loop to the end of the job; return its metrics."""
    metrics = Metrics("worker", 0)
    times = StepTimes(metrics, traced)
    with closing(TrainingLoop(job, job.load_data()[0], exchange, times)) as loop:
        asyncio.run(loop.run())
    return metrics


STOP = StepResult("applied", stop=True)


def test_batches_are_computed_in_the_order_in_which_they_were_given() -> None:
    more = StepResult("applied", (7, 2))
    exchange = Scripted(more, StepResult("dropped"), StepResult("applied"), STOP, batches=(5, 9))
    train(exchange)
    assert [report.batch for report in exchange.reports] == [5, 9, 7, 2]
    assert {report.examples for report in exchange.reports} == {4}
    assert np.isfinite(exchange.gradients).all()
    assert exchange.is_over


def test_every_step_is_counted_the_last_one_too() -> None:
    metrics = train(Scripted(StepResult("applied", (1,)), STOP))
    value = metrics.registry.get_sample_value
    assert value("zmqtrain_examples_total") == 8
    assert value("zmqtrain_step_duration_seconds_count") == 2


def test_times_of_waiting_and_updating_are_not_counted_as_push() -> None:
    metrics = train(Scripted(StepResult("applied", (1,), held_s=2.0, update_s=3.0), STOP))
    phases = metrics.phase_duration_seconds
    assert (phases.wait.total, phases.update.total, phases.push.total < 1) == (2.0, 3.0, True)


def test_local_steps_are_counted_and_those_with_a_push_are_traced() -> None:
    exchange = Scripted(
        StepResult("applied", stop=True, sequence=7), batches=(0, 1, 2), round=Round(0, 3)
    )
    traced: list[tuple[int, str]] = []
    job = JOB.with_overrides(policy="local-steps:3")
    metrics = train(exchange, job, lambda push, _, __, result: traced.append((push, result)))
    assert metrics.registry.get_sample_value("zmqtrain_steps_total") == 3
    assert traced == [(7, "applied")]


def test_batches_of_a_round_that_is_broken_off_are_computed_again() -> None:
    calls = itertools.count()

    class Spoilt(LinearRegression):
        def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
            loss = super().loss_and_gradients(parameters, batch, out)
            return float("nan") if next(calls) == 1 else loss

    more = StepResult("applied")
    answers = StepResult("refused", (7,)), more, more, STOP
    exchange = Scripted(*answers, batches=(0, 1, 2), round=Round(0, 3))
    job = JOB.with_overrides(policy="local-steps:3").model_copy(update={"model": Spoilt()})
    train(exchange, job)
    assert [report.batch for report in exchange.reports] == [1, 0, 2, 7]


def test_worker_that_is_fenced_joins_again_and_forgets_its_batches() -> None:
    exchange = Scripted(FencedError("a new life"), STOP, batches=(3, 4))
    train(exchange)
    assert exchange.joins == 2
    assert [report.batch for report in exchange.reports] == [3, 3]


def test_worker_whose_job_goes_back_after_it_has_finished_joins_again() -> None:
    class GoesBack(Scripted):
        async def wait_for_end(self) -> None:
            await super().wait_for_end()
            if self.joins == 1:
                raise FencedError("a new generation")

    exchange = GoesBack(STOP, STOP)
    train(exchange)
    assert exchange.joins == 2


def test_other_errors_of_the_exchange_end_the_training() -> None:
    with pytest.raises(PeerLostError, match="gone"):
        train(Scripted(PeerLostError("gone")))


def test_worker_that_may_go_on_without_a_batch_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="no batch"):
        train(Scripted(StepResult("applied")))


def test_gradient_that_is_not_finite_is_reported_as_such() -> None:
    class Spoilt(LinearRegression):
        def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
            super().loss_and_gradients(parameters, batch, out)
            out["bias"][...] = np.inf
            return 0.0

    exchange = Scripted(STOP)
    metrics = train(exchange, JOB.model_copy(update={"model": Spoilt()}))
    assert not exchange.reports[0].finite
    assert metrics.registry.get_sample_value("zmqtrain_nonfinite_gradients_total") == 1


def test_no_thread_is_left_when_a_loop_is_closed() -> None:
    before = set(threading.enumerate())
    train(Scripted(StepResult("applied", (1,)), STOP))
    assert set(threading.enumerate()) == before
