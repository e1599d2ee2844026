"""Local steps: what they promise, in whole runs and by hand."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from zmqtrain import Job
from zmqtrain.callbacks import LearningRateScheduler
from zmqtrain.compute.arrays import Flat
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.data import Arrays
from zmqtrain.data.batches import BatchPlan
from zmqtrain.errors import ConfigError
from zmqtrain.models import MLP
from zmqtrain.optim import LAMB, SGD, Adam, Cosine, Momentum, Piecewise
from zmqtrain.store.placement import place
from zmqtrain.training.exchange import Membership, Round, StepReport
from zmqtrain.training.local_steps import LocalRounds
from zmqtrain.training.own_steps import OwnSteps

chosen = np.random.default_rng(0)
ROWS = chosen.standard_normal((38, 5)).astype(np.float32)
CLASSES = chosen.integers(0, 3, 38)


def job(**fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "model": MLP(5, 4, 3),
        "data": Arrays((ROWS, CLASSES), (ROWS, CLASSES)),
        "optimizer": Adam(Cosine(0.1, 30)),
        "batch_size": 4,
        "partition_nbytes": 16,
        "policy": "local-steps:5",
    }
    return Job(**defaults | ({} if "epochs" in fields else {"steps": 17}) | fields)


def bits(summary: Any) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in summary.parameters.items()}


class NotFinite(MLP):
    """A model whose loss of two batches is NaN."""

    def seed_batch(self, seed: int, batch: int) -> None:
        self.is_bad = batch in (3, 9)

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        loss = super().loss_and_gradients(parameters, batch, out)
        return float("nan") if self.is_bad else loss


@pytest.mark.parametrize(
    "fields",
    [
        {"evaluate_every": 3},
        {"optimizer": LAMB(0.1), "l2": 0.01, "clip_norm": 0.5, "partition_nbytes": 0},
        {"groups": {"*/bias": {"optimizer": Momentum(0.1)}}, "policy": "local-steps:100"},
        {"model": NotFinite(5, 4, 3)},
        {"epochs": 2, "callbacks": [LearningRateScheduler(lambda epoch, rate: 0.1 / 2**epoch)]},
        {"policy": "local-steps:3,after=6", "optimizer": SGD(0.1)},
        {"devices": "cpu:0,cpu:1", "batch_size": 2},
    ],
    ids=["schedule", "lamb", "groups", "not finite", "passes", "after", "devices"],
)
def test_one_worker_ends_as_without_local_steps_bit_for_bit(fields: dict[str, Any]) -> None:
    expected = zmqtrain.run(job(**fields | {"policy": "sync-replicas"}))
    every = fields.get("evaluate_every", 1)
    for way in ({}, {"workers": 1, "ps": 2}, {"workers": 1, "ps": 0}):
        found = zmqtrain.run(job(**fields), **way)
        assert bits(found) == bits(expected), way
        assert found.global_step == expected.global_step
        assert found.examples == expected.examples
        assert all(each["step"] % every in (0, 17 % every) for each in found.evaluations)


def rounds_of(batches: range, workers: int, every: int) -> Iterator[list[range]]:
    """Yield the batches of each worker, round by round."""
    while batches:
        these, batches = batches[: workers * every], batches[workers * every :]
        yield [these[worker::workers] for worker in range(workers) if these[worker::workers]]


def trained_by_hand(
    workers: int, every: int, rate: float, momentum: float, passes: int = 0
) -> dict[str, Any]:
    """Return what 7 steps of local SGD give, or some passes, with Nesterov's outer rule of 0.7."""
    whole, model = job(), MLP(5, 4, 3)
    common = whole.initial_parameters()
    velocity = {name: np.zeros_like(value) for name, value in common.items()}
    plan = BatchPlan(len(ROWS), 4, whole.seed, exact=passes > 0)
    size = plan.of_pass if passes else 7 * workers
    parts = [range(number * size, (number + 1) * size) for number in range(passes or 1)]
    for batches in chain.from_iterable(rounds_of(part, workers, every) for part in parts):
        results, weights = [], []
        for own_batches in batches:
            own = {name: value.copy() for name, value in common.items()}
            out = {name: np.empty_like(value) for name, value in common.items()}
            for at in map(plan.indices, own_batches):
                model.loss_and_gradients(own, (ROWS[at], CLASSES[at]), out)
                for name in own:
                    own[name] -= np.float32(rate) * out[name]
            results.append(own)
            weights.append(sum(map(plan.rows, own_batches)))
        for name in common:
            mean = np.average([own[name] for own in results], axis=0, weights=weights)
            change = common[name] - mean
            velocity[name] = momentum * velocity[name] + change
            step_of = momentum * velocity[name] + change if momentum else change
            common[name] = common[name] - np.float32(0.7 if momentum else 1.0) * step_of
    return common


@pytest.mark.parametrize("ps", [0, 2])
def test_short_rounds_at_the_end_of_a_pass_weigh_as_their_examples(ps: int) -> None:
    found = zmqtrain.run(
        job(policy="local-steps:3", optimizer=SGD(0.1), epochs=2), workers=2, ps=ps
    )
    expected = trained_by_hand(2, 3, 0.1, 0.0, passes=2)
    for name, value in expected.items():
        np.testing.assert_allclose(found.parameters[name], value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.parametrize("ps", [0, 1])
def test_workers_make_the_steps_of_local_sgd(momentum: float, compression: str, ps: int) -> None:
    outer = Momentum(0.7, momentum, nesterov=True) if momentum else None
    fields = {"policy": "local-steps:3", "optimizer": SGD(0.1), "outer": outer, "steps": 7}
    found = zmqtrain.run(job(**fields, compression=compression), workers=2, ps=ps)
    expected = trained_by_hand(2, 3, 0.1, momentum)
    for name, value in expected.items():
        np.testing.assert_allclose(found.parameters[name], value, rtol=2e-5, atol=2e-6)


OUTERS = [None, SGD(0.8), Momentum(0.7, 0.9, nesterov=True)]


@pytest.mark.parametrize("outer", OUTERS, ids=str)
@pytest.mark.parametrize("fields", [{"epochs": 2}, {"evaluate_every": 3}, {"compression": "bf16"}])
def test_one_worker_without_rounds_is_one_with_them_up_to_rounding(
    outer: Any, fields: dict[str, Any]
) -> None:
    given = {"outer": outer, "optimizer": SGD(0.1)} | fields
    found = zmqtrain.run(job(policy="local-steps:5,async", **given), workers=1, ps=2)
    expected = zmqtrain.run(job(policy="local-steps:5", **given))
    for name, value in expected.parameters.items():
        tolerance = 2e-2 if "compression" in fields else 2e-6
        np.testing.assert_allclose(found.parameters[name], value, rtol=1e-5, atol=tolerance)
    assert (found.global_step, found.examples) == (expected.global_step, expected.examples)


@pytest.mark.parametrize("ps", [0, 1, 2])
def test_without_rounds_a_step_is_a_batch_of_one_worker(ps: int) -> None:
    given: dict[str, Any] = {"steps": 60, "evaluate_every": 20}
    found = zmqtrain.run(job(policy="local-steps:4,after=2,async", **given), workers=3, ps=ps)
    assert (found.global_step, found.examples) == (60, (2 * 3 + 58) * 4)
    assert {each["step"] for each in found.evaluations} <= {20, 40, 60}
    epochs = zmqtrain.run(job(policy="local-steps:4,async", epochs=3), workers=2, ps=ps)
    assert (epochs.global_step, epochs.examples) == (3 * 10, 3 * 38)


@pytest.mark.parametrize("ps", [0, 2])
def test_rounds_of_one_step_are_sync_replicas_up_to_rounding(ps: int) -> None:
    given: dict[str, Any] = {"optimizer": SGD(0.1), "epochs": 2}
    found = zmqtrain.run(job(policy="local-steps:1", **given), workers=3, ps=ps)
    expected = zmqtrain.run(job(policy="sync-replicas", **given), workers=3, ps=ps)
    for name, value in expected.parameters.items():
        np.testing.assert_allclose(found.parameters[name], value, rtol=2e-5, atol=2e-6)
    assert (found.global_step, found.examples) == (expected.global_step, expected.examples)


LAYOUT = place(job().variables(), 1)[0]
OWN_LAYOUT = place(job().variables(), 1, partition_nbytes=0)[0]


def elements(flat: Flat) -> Flat:
    """Return all elements of the variables, without the zeros between them."""
    return np.concatenate([cut.run(flat) for cut in LAYOUT.slices])


def member(**fields: Any) -> tuple[LocalRounds, Flat, Flat]:
    """Return a worker's local steps, the common parameters and where its result lies."""
    whole = job(**fields)
    common = LAYOUT.flat_of(whole.initial_parameters())
    result = np.zeros_like(common)
    memory = Membership([LAYOUT], [common], [result], ())
    return LocalRounds(whole, memory, ThreadTeam(1), 1), common, result


def made(local: LocalRounds, batch: int = 0, gradient: float = 1) -> StepReport:
    """Make a step with this gradient of each element; return the report of the round."""
    local.load()
    for cut in OWN_LAYOUT.slices:
        cut.run(local.memory.gradients[0])[:] = gradient
    local.apply(StepReport(batch, 4, 0.5, True))
    return local.result()


def test_joiner_has_the_rate_of_the_jobs_step_and_the_moments_of_its_own() -> None:
    local, common, result = member(optimizer=Adam(Piecewise([100], [0.5, 0.25])))
    local.go_on(Round(200, 1))
    made(local)  # Adam's first step is as long as the rate
    np.testing.assert_allclose(elements(common - result), 0.25, rtol=1e-5)
    local.go_on(Round(300, 1, learning_rate=0.125))
    made(local)
    np.testing.assert_allclose(elements(common - result), 0.125, rtol=1e-5)


def test_round_begins_from_the_common_parameters() -> None:
    local, common, result = member(optimizer=SGD(0.5))
    local.go_on(Round(0, 1))
    made(local)
    common[:] = 3
    made(local)
    assert not (elements(result) == 2.5).any()
    local.go_on(Round(1, 1))
    report = made(local, batch=7)
    assert (elements(result) == 2.5).all()
    assert (report.batch, report.batches, report.examples) == (7, 1, 4)


def test_report_of_a_round_is_that_of_all_its_batches() -> None:
    local, _, _ = member()
    a, b, c = (variable.name for variable in job().variables()[:3])
    local.go_on(Round(0, 2))
    local.load()
    local.apply(StepReport(5, 4, 1.0, True, {"hits": 1.0}, frozenset({a, b})))
    local.apply(StepReport(8, 2, 4.0, True, {"hits": 2.0}, frozenset({b, c})))
    given = {"sums": {"hits": 3.0}, "absent": frozenset({b}), "weight": 6, "batches": 2}
    assert local.result() == StepReport(5, 6, 2.0, True, **given)


def test_optimizer_with_the_state_of_another_one_makes_the_same_steps() -> None:
    whole = job(optimizer=Adam(0.1))
    one, other = (OwnSteps(whole, OWN_LAYOUT, 1) for _ in range(2))
    one.begin()
    one.go_on(100, None)
    for _ in range(3):
        one.gradient[:] = 1
        one.apply({whole.variables()[0].name})
    other.parameters[:] = one.parameters
    other.begin()
    other.inner.load(one.inner.state())
    for each in (one, other):
        each.go_on(103, None)
        each.gradient[:] = 1
        each.apply(())
    assert one.parameters.tobytes() == other.parameters.tobytes()


def test_difference_is_from_where_the_round_began_though_others_go_on() -> None:
    local, common, result = member(optimizer=SGD(0.5))
    local.go_on(Round(0, 2, sends_difference=True))
    local.load()
    common[:] = 7
    made(local)
    np.testing.assert_allclose(elements(result), -0.5, rtol=1e-5)


@pytest.mark.parametrize("inner_state", ["fresh", "keep"])
def test_result_that_is_not_finite_is_reported_and_the_optimizer_begins_anew(
    inner_state: str, tmp_path: Path
) -> None:
    fields = {"inner_state": inner_state, "logdir": str(tmp_path)}
    local, common, result = member(optimizer=Momentum(0.5, 0.9), **fields)
    local.go_on(Round(0, 1))
    assert made(local).finite
    local.go_on(Round(1, 1))
    assert not made(local, gradient=np.inf).finite
    local.go_on(Round(1, 1))
    assert made(local).finite
    np.testing.assert_allclose(elements(common - result), 0.5, rtol=1e-5)


def test_state_is_not_kept_under_parameters_that_did_not_come(tmp_path: Path) -> None:
    local, _, _ = member(inner_state="keep", logdir=str(tmp_path))
    local.go_on(Round(0, 1))
    made(local)
    for step, kept in [(None, 0), (1, 1)]:
        local.end(step)
        assert len(list(tmp_path.rglob("*.npz"))) == kept


@pytest.mark.parametrize("workers", [1, 2])
def test_job_resumes_with_an_outer_rule_that_it_did_not_have(workers: int, tmp_path: Path) -> None:
    outer = Momentum(0.7, 0.9, nesterov=True)
    zmqtrain.run(job(policy="sync-replicas", steps=6, logdir=str(tmp_path)), workers=workers)
    for steps in (16, 26):
        fields: dict[str, Any] = {"steps": steps, "outer": outer, "logdir": str(tmp_path)}
        found = zmqtrain.run(job(**fields), workers=workers)
        assert (found.global_step, found.examples) == (steps, steps * workers * 4)
    back = job(policy="sync-replicas", steps=30, logdir=str(tmp_path))
    assert zmqtrain.run(back, workers=workers).examples == 30 * workers * 4


def test_state_of_steps_that_were_undone_is_not_taken_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(steps: int, workers: int) -> None:
        fields: dict[str, Any] = {"inner_state": "keep", "logdir": str(tmp_path)}
        zmqtrain.run(job(steps=steps, policy="local-steps:4", **fields), workers=workers)

    for steps in (8, 16, 28):
        run(steps, workers=2)
    for steps in (16, 28):
        shutil.rmtree(tmp_path / f"checkpoints/step-{steps:08d}")
    run(16, workers=1)
    with caplog.at_level(logging.INFO, "zmqtrain"):
        run(20, workers=2)
    assert f"is that of {tmp_path}/inner/worker-0/16.npz" in caplog.text
    assert "worker-1/16.npz cannot be used: it is of other parameters" in caplog.text
    assert caplog.text.count("cannot be used") == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"moving_average": 0.9}, "moving_average is 0.9; the policy is local-steps:5"),
        ({"overlap": True}, "overlap is True; the policy is local-steps:5"),
        ({"outer": Adam(0.1)}, "expected SGD or Momentum"),
        ({"outer": Momentum(0.1, dampening=0.5)}, "expected no dampening"),
        ({"exchange": "board"}, "the policy is local-steps:5 instead of sync-replicas"),
        (
            {"outer": Momentum(0.7), "policy": "local-steps:5,async"},
            r"Nesterov's; expected SGD, Momentum\(..., nesterov=True\) or None",
        ),
        (
            {"inner_state": "keep", "policy": "local-steps:5,async", "logdir": "logs"},
            "use inner_state fresh, or leave out async",
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        zmqtrain.run(job(**fields), workers=2, ps=0)


def test_epochs_log_how_alike_workers_moved() -> None:
    found = zmqtrain.run(job(epochs=3, policy="local-steps:2"), workers=2, ps=1)
    history = found.history.history
    assert all(0 < value <= 1.001 for value in history["agreement"])
    alone = zmqtrain.run(job(epochs=3, policy="local-steps:2"))
    assert "agreement" not in alone.history.history
