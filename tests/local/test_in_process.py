"""`zmqtrain.run`: a whole cluster inside this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import zmqtrain
from tests.endings import bad_end
from tests.harness import Stage
from tests.integration.jobs import counting_job, digits_job
from tests.local.test_kinds import interrupt
from zmqtrain import Job, Summary
from zmqtrain.chief.in_process import LocalRun
from zmqtrain.data import Arrays, NoisyLine
from zmqtrain.data.batches import BatchPlan
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.local.in_process import Stop
from zmqtrain.models import LinearRegression
from zmqtrain.observe.summary import parameters_sha256
from zmqtrain.optim import SGD, new_slots
from zmqtrain.policies import Decision, Held
from zmqtrain.policies.hogwild import Hogwild
from zmqtrain.protocol.status import Status
from zmqtrain.store.checkpoint import read_parameters
from zmqtrain.store.manifest import read_manifest
from zmqtrain.store.placement import place
from zmqtrain.training.evaluation import evaluate


def undisturbed(job: Job, gradients: int) -> dict[str, NDArray[np.float32]]:
    """Train in one loop on the batches of ``gradients`` workers joined; return the parameters."""
    train, _ = job.data.load(None)
    plan = BatchPlan(len(train), gradients * job.batch_size, job.seed)
    (layout,) = place(job.variables(), shards=1)
    flat, gradient = np.empty(layout.size, np.float32), np.empty(layout.size, np.float32)
    values = job.initial_parameters()
    layout.gather(values, flat)
    slots = new_slots(job.update(), flat)
    out = {name: np.empty_like(value) for name, value in values.items()}
    for step in range(job.steps):
        job.model.loss_and_gradients(values, train.take(plan.indices(step)), out)
        layout.gather(out, gradient)
        job.update().update(flat, gradient, slots, step)
        layout.scatter(flat, values)
    return values


@pytest.mark.parametrize(
    ("policy", "workers", "gradients"),
    [
        ("sync-replicas", 1, 1),
        ("sync-replicas", 2, 2),
        ("sync-replicas", 3, 3),
        ("sync-replicas:aggregate=4", 1, 4),
        ("hogwild", 1, 1),
        ("bounded-staleness:2", 1, 1),
    ],
)
def test_parameters_are_those_of_one_loop_over_the_joined_batches(
    tmp_path: Path, policy: str, workers: int, gradients: int
) -> None:
    job = digits_job(policy=policy, steps=40, logdir=str(tmp_path))
    summary = zmqtrain.run(job, workers=workers, ps=2)
    found = read_checkpoint(summary)
    expected = undisturbed(job, gradients)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("policy", "gradients", "ps"),
    [
        ("hogwild", 1, 2),
        ("bounded-staleness:2", 1, 1),
        ("bounded-staleness:2", 1, 2),
        ("sync-replicas:aggregate=1", 1, 1),
        ("sync-replicas:aggregate=4", 4, 2),
        ("sync-replicas", 3, 1),
    ],
)
def test_every_example_of_a_finished_pass_is_counted_once(
    tmp_path: Path, policy: str, gradients: int, ps: int
) -> None:
    job = counting_job(
        policy=policy, aggregate=gradients, steps=90, examples=100, logdir=str(tmp_path)
    )
    summary = zmqtrain.run(job, workers=3, ps=ps)
    batches = counted_batches(summary)
    assert len(batches) == 90 * gradients == summary.pushes["applied"]
    counts = check_counts(job, summary)
    passed_over = set(range(batches[-1])).difference(batches)
    assert len(passed_over) <= 3 * (1 + job.prefetch)  # no step waits for them any more
    if not passed_over:
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize(
    ("workers", "runs"),
    [
        (1, [(30, 2), (60, None), (60, 0), (90, 1)]),
        (3, [(30, 2), (30, 0), (60, 0), (60, 2), (90, 2)]),
    ],
)
def test_job_changes_its_strategy_at_a_checkpoint_and_back_without_a_trace(
    workers: int, runs: list[tuple[int, int | None]], tmp_path: Path
) -> None:
    """The parameters are those of a run that changed nothing, bit for bit. ``runs``: until which
    step, on how many ps."""
    job, before = digits_job(policy="sync-replicas", steps=90), {}
    for steps, ps in runs:
        part = job.with_overrides(steps=steps, logdir=str(tmp_path))
        resumed = zmqtrain.run(part, workers=workers, ps=ps)
        digest = resumed.parameters_sha256
        assert before.setdefault(steps, digest) == digest  # nothing is trained at the same step
    whole = zmqtrain.run(job, workers=workers, ps=1)
    assert (digest, resumed.examples) == (whole.parameters_sha256, whole.examples)
    assert resumed.pushes["applied"] == 30 * workers
    assert len(set(before.values())) == 3
    assert read_manifest(Path(str(resumed.checkpoint))).generation == len(runs)


def test_job_goes_on_without_ps_and_back_with_other_workers_and_every_example_counts_once(
    tmp_path: Path,
) -> None:
    """Also from checkpoints without ps whose variables were not yet placed end to end."""
    older = {"placement": "greedy"}
    for steps, workers, ps, fields in (
        (9, 2, 1, {}),
        (18, 3, 0, older),
        (27, 2, 0, {}),
        (36, 1, 2, {}),
    ):
        job = counting_job(
            policy="sync-replicas:aggregate=2",
            aggregate=2,
            steps=steps,
            logdir=str(tmp_path),
            **fields,
        )
        summary = zmqtrain.run(job, workers=workers, ps=ps)
        placement = read_manifest(Path(str(summary.checkpoint))).fingerprint["placement"]
        assert placement.startswith("greedy" if ps or fields else "contiguous")
        assert len(counted_batches(summary)) == 2 * steps
        check_counts(job, summary)


def test_without_ps_the_policy_is_sync_replicas_unless_the_job_names_one() -> None:
    job = digits_job(steps=3)
    told = [
        zmqtrain.run(each, workers=2, ps=ps)
        for each, ps in [
            (job, 0),
            (job.with_overrides(strategy="multi-worker-mirrored"), None),
            (job.with_overrides(policy="hogwild"), 0),
            (job, None),
        ]
    ]
    assert [(each.policy, each.strategy, each.ps) for each in told] == [
        ("sync-replicas", "multi-worker-mirrored", 0),
        ("sync-replicas", "multi-worker-mirrored", 0),
        ("hogwild", "multi-worker-mirrored", 0),
        ("hogwild", "parameter-server", 1),
    ]


@pytest.mark.parametrize("cluster", [{}, {"workers": 2, "ps": 2}, {"workers": 2, "ps": 0}])
@pytest.mark.parametrize(
    ("change", "told", "begins_again"),
    [
        ({}, "", False),
        ({"data": (np.ones((40, 1), np.float32), np.ones(40))}, "data: another than then", False),
        ({"data": (np.zeros((30, 1), np.float32), np.zeros(30))}, "had 40 examples, has 30", True),
        ({"batch_size": 4}, "batch_size was 5, is 4", True),
        ({"seed": 1}, "seed was 0, is 1", True),
    ],
)
def test_job_resumed_on_other_data_says_so_and_begins_anew_with_its_batches_if_they_differ(
    cluster: dict[str, int], change: dict[str, Any], told: str, begins_again: bool,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    data = np.zeros((40, 1), np.float32), np.zeros(40)
    model = LinearRegression(1)
    usual = {"model": model, "data": data, "optimizer": SGD(0.1), "batch_size": 5, "seed": 0}
    usual |= {"policy": "hogwild:whole", "logdir": str(tmp_path)}
    first = zmqtrain.run(Job(**usual, steps=6), **cluster)
    second = zmqtrain.run(Job(**usual | change, steps=9), **cluster)
    assert counted_batches(second) == [*range(3 if begins_again else 9)]
    assert first.global_step + 3 == second.global_step
    assert (told in caplog.text) and ("the data starts again" in caplog.text) == begins_again


@pytest.mark.parametrize(
    ("policy", "options", "unused"),
    [
        ("hogwild", {}, ""),
        ("hogwild", {"inner": SGD(0.1)}, "hogwild makes no local steps, so inner will"),
        ("sync-replicas", {"inner": SGD(0.1), "outer": SGD(1.0)}, "so inner and outer will"),
        ("local-steps:2,after=3", {"inner": SGD(0.1), "outer": SGD(1.0)}, ""),
    ],
)
@pytest.mark.parametrize("cluster", [{}, {"ps": 1}])
def test_optimizer_of_local_steps_that_the_policy_does_not_use_is_a_warning(
    policy: str, options: dict[str, Any], unused: str, cluster: dict[str, int],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    job = line(LinearRegression(1), policy=policy, **options)
    zmqtrain.run(job.model_copy(update={"steps": 4}), **cluster)
    assert unused in caplog.text
    assert ("makes no local steps" in caplog.text) == bool(unused)


def test_progress_is_told_and_its_last_word_is_the_end() -> None:
    told: list[Status] = []
    summary = zmqtrain.run(digits_job(steps=50), workers=2, on_progress=told.append)
    assert (told[-1].step, told[-1].stop) == (50, summary.ended)
    assert {task.task for task in told[-1].tasks} >= {"ps 0", "chief 0"}


def test_ctrl_c_in_a_notebook_ends_the_run_in_order() -> None:
    async def cell() -> Summary:
        return bad_end(digits_job(steps=10**6), workers=2, on_progress=interrupt)

    loop = asyncio.new_event_loop()  # as a notebook has it: without asyncio.run's Ctrl-C
    try:
        summary = loop.run_until_complete(cell())
    finally:
        loop.close()
    assert (summary.ended, summary.exit_code) == ("stopped by a signal", 130)


INTERRUPTED = """
import signal, zmqtrain

zmqtrain.run(job, on_progress=lambda _: signal.raise_signal(signal.SIGINT))
"""


def test_script_that_ctrl_c_ends_has_the_exit_code_of_a_signal(stage: Stage) -> None:
    script = Path(stage.job(steps=10**6))
    script.write_text(script.read_text() + INTERRUPTED)
    ended = stage.start("script", sys.executable, script)
    assert ended.exit_code() == -signal.SIGINT  # 130 in a shell
    assert ended.log.endswith("KeyboardInterrupt: stopped by a signal\n")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "what",
    [
        "data.Digits.load",
        "chief.uploads.RemoteCheckpoints",
        "store.checkpoint.begin",
        "store.logdir.newest_valid",
        "store.logdir.last_generation",
        "store.logdir.note_generation",
    ],
)
def test_ctrl_c_before_the_job_begins_ends_even_a_call_that_hangs(
    what: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if not over.wait(timeout=30):
            late.append(what)

    over, late = threading.Event(), list[str]()
    monkeypatch.setattr(f"zmqtrain.{what}", hang)
    upload = "s3://bucket" if "uploads" in what else None
    with pytest.raises(KeyboardInterrupt):
        zmqtrain.run(digits_job(logdir=str(tmp_path), upload=upload), workers=workers)
    assert not late
    over.set()


@pytest.mark.parametrize("passes", range(4))
def test_ctrl_c_counts_at_the_moment_when_the_beginning_has_ended(passes: int) -> None:
    codes, stop = list[int](), Stop()

    async def beginning() -> None:
        signal.raise_signal(signal.SIGINT)
        for _ in range(passes):
            await asyncio.sleep(0)

    async def run() -> None:
        await stop.breaks(beginning())
        stop.reach(codes.append)
        await asyncio.sleep(0.05)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
        assert codes == [130]


async def test_run_inside_a_running_loop_leaves_that_loop_running() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.ensure_future(tick())
    summary = await asyncio.to_thread(zmqtrain.run, digits_job(steps=20))
    assert zmqtrain.run(digits_job(steps=20)).parameters_sha256 == summary.parameters_sha256
    ticking.cancel()
    assert ticks > 0


def test_error_of_a_run_has_no_other_error_before_it_than_its_cause() -> None:
    class Failing(LinearRegression):
        def loss_and_gradients(self, *_: Any) -> float:
            raise ValueError("mine")

    job = digits_job(steps=1).model_copy(update={"model": Failing(64)})
    with pytest.raises(ConfigError, match="ValueError: mine") as raised:
        zmqtrain.run(job)
    cause = raised.value.__cause__
    assert isinstance(cause, ValueError)
    assert (raised.value.__context__, cause.__context__) == (cause, None)


def line(model: Any, **fields: Any) -> Job:
    x = np.linspace(-1, 1, 50, dtype=np.float32).reshape(-1, 1)
    data = Arrays((x, 2 * x[:, 0]), (x, 2 * x[:, 0]))
    return Job(model=model, data=data, optimizer=SGD(0.1), batch_size=5, steps=100, **fields)


def test_periodic_evaluation_and_moving_average_are_reported() -> None:
    job = digits_job(policy="sync-replicas", steps=60, evaluate_every=20, moving_average=0.9)
    plain = zmqtrain.run(job, workers=2)
    average = zmqtrain.run(job.model_copy(update={"evaluate_average": True}), workers=2)
    assert plain.parameters_sha256 == average.parameters_sha256
    assert plain.loss != average.loss
    _, evaluation = job.data.load(None)
    for row in plain.evaluations:
        of_step = undisturbed(job.model_copy(update={"steps": row["step"]}), 2)
        assert row["step"] % 20 == 0
        assert row["loss"] == pytest.approx(evaluate(job.model, of_step, evaluation)["loss"], 1e-3)
    reference = evaluate(job.model, undisturbed(job, 2), evaluation)
    assert plain.loss == pytest.approx(reference["loss"], rel=1e-3)
    assert parameters_sha256(plain.parameters) == plain.parameters_sha256
    measured = evaluate(job.model, average.parameters, evaluation)
    assert measured["loss"] == pytest.approx(average.loss)


def read_checkpoint(summary: Summary) -> dict[str, NDArray[np.float32]]:
    assert summary.checkpoint is not None
    path = Path(summary.checkpoint)
    return read_parameters(path, read_manifest(path))


def counted_batches(summary: Summary) -> list[int]:
    """Return the batches that the final checkpoint says were learned from."""
    assert summary.checkpoint is not None
    return read_manifest(Path(summary.checkpoint)).ledger.counted()


def check_counts(job: Job, summary: Summary) -> NDArray[np.float32]:
    """Check that a counting job has learned once from each counted batch; return its counts."""
    counts = read_checkpoint(summary)["counts"]
    plan = BatchPlan(len(counts), job.batch_size, job.seed)
    expected = np.bincount(np.concatenate([plan.indices(b) for b in counted_batches(summary)]))
    np.testing.assert_array_equal(counts, expected)
    return counts


@pytest.mark.parametrize("counts", [{"workers": 0}, {"ps": -1}, {"workers": "2"}, {"ps": 1.0}])
def test_number_of_tasks_that_is_none_is_an_error_that_names_it(counts: dict[str, Any]) -> None:
    ((name, value),) = counts.items()
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}; expected a whole")):
        zmqtrain.run(digits_job(steps=1), **counts)


class Remembering:
    """Keeps its batch from one part of its computing to the next, as many models keep things."""

    def __init__(self, **others: Any) -> None:
        self.model = LinearRegression()
        self.others = others

    def parameters(self, seed: int) -> dict[str, Any]:
        return self.model.parameters(seed)

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        self.batch = batch
        time.sleep(0.001)  # others have their turn now
        return self.model.loss_and_gradients(parameters, self.batch, out)

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return self.model.metrics(parameters, batch)


def test_every_worker_has_a_model_of_its_own() -> None:
    plain = line(LinearRegression(), policy="sync-replicas")
    remembering = plain.model_copy(update={"model": Remembering()})
    expected = zmqtrain.run(plain, workers=3).parameters_sha256
    assert zmqtrain.run(remembering, workers=3).parameters_sha256 == expected


def test_model_that_cannot_be_copied_is_refused_where_several_workers_need_one() -> None:
    job = line(Remembering(lock=threading.Lock()))
    with pytest.raises(ConfigError, match="cannot be copied"):
        zmqtrain.run(job, workers=2)
    assert zmqtrain.run(job).exit_code == 0


class Raising(Remembering):
    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        raise KeyError("weights")


def test_worker_that_ends_with_an_error_tells_it_to_its_ps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "zmqtrain")
    with pytest.raises(ConfigError):
        zmqtrain.run(line(Raising()), workers=2)
    assert [text for text in caplog.messages if re.match(r"worker . left: .*weights", text, re.S)]


@pytest.mark.parametrize("ps", [0, 1])
def test_training_loss_is_the_mean_of_the_workers_last_ones(ps: int) -> None:
    fields = {"policy": "sync-replicas", "seed": 2}
    summary = zmqtrain.run(
        line(LinearRegression(), **fields).with_overrides(steps=1), workers=2, ps=ps
    )
    targets = 2 * np.linspace(-1, 1, 50)
    losses = [np.mean(targets[BatchPlan(50, 5, 2).indices(batch)] ** 2) for batch in (0, 1)]
    assert summary.train_loss == pytest.approx(np.mean(losses), rel=1e-5)


def figures(summary: Summary) -> dict[str, Any]:
    """Return what is the same wherever one worker trained."""
    others = {"strategy", "exchange", "ps", "seconds", "steps_per_second", "checkpoint"}
    return {name: value for name, value in json.loads(summary.json()).items() if name not in others}


@pytest.mark.parametrize(
    "policy", ["hogwild", "sync-replicas", "sync-replicas:aggregate=3", "bounded-staleness:1"]
)
def test_one_worker_alone_comes_to_what_it_comes_to_with_a_ps(policy: str) -> None:
    job = digits_job(policy=policy, l2=0.001, moving_average=0.9, clip_norm=1.0)
    job = job.with_overrides(evaluate_average=True)
    alone, with_ps = zmqtrain.run(job), zmqtrain.run(job, ps=1)
    assert (alone.ps, with_ps.ps) == (0, 1)
    assert figures(alone) == figures(with_ps)
    averages = [one.parameters for one in (alone, with_ps)]
    assert parameters_sha256(averages[0]) == parameters_sha256(averages[1])
    assert parameters_sha256(averages[0]) != alone.parameters_sha256


def test_ctrl_c_in_the_middle_of_a_long_step_counts_that_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped, stop = threading.Event(), LocalRun.stop
    monkeypatch.setattr(LocalRun, "stop", lambda *a: (stop(*a), stopped.set()))

    class Long(LinearRegression):
        """Its first step is computed in a thread, as every one that may be long."""

        def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
            os.kill(os.getpid(), signal.SIGINT)
            assert stopped.wait(10)
            return super().loss_and_gradients(parameters, batch, out)

    job = Job(model=Long(), data=NoisyLine(), optimizer=SGD(), batch_size=5, steps=1000)
    summary = bad_end(job)
    assert (summary.exit_code, summary.pushes["applied"]) == (130, 1)


class Waiting(Hogwild):
    """A policy that waits for a second worker."""

    def __init__(self, options: str) -> None:
        super().__init__()

    def join(self, worker: int) -> list[Decision]:
        return []

    def held(self) -> list[Held]:
        return [Held(0, "it wants company", ())]


def test_policy_that_would_wait_for_other_workers_for_ever_ends_the_run() -> None:
    summary = bad_end(digits_job(policy="tests.local.test_in_process:Waiting"))
    assert summary.exit_code == ExitCode.PEER_LOST
    assert "it wants company" in summary.ended
