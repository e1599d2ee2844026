"""`zmqtrain.run(job)`: one worker alone gives what one worker with a ps gives."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.endings import bad_end
from tests.integration import jobs
from tests.local.test_in_process import interrupt
from zmqtrain import Job, Summary
from zmqtrain.chief.in_process import LocalRun
from zmqtrain.data import NoisyLine
from zmqtrain.errors import ExitCode
from zmqtrain.models import LinearRegression
from zmqtrain.observe.summary import parameters_sha256
from zmqtrain.optim import SGD
from zmqtrain.policies import Decision, Held
from zmqtrain.protocol.status import Status
from zmqtrain.store.manifest import read_manifest


def digits_job(**fields: Any) -> Job:
    return jobs.digits_job(**{"steps": 40} | fields)


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


def test_job_goes_on_alone_and_with_ps_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    job = digits_job(steps=60, logdir=str(tmp_path))
    whole = zmqtrain.run(digits_job(steps=60))
    zmqtrain.run(job.with_overrides(steps=20), ps=2)
    zmqtrain.run(job.with_overrides(steps=40))
    resumed = zmqtrain.run(job, ps=1)
    assert resumed.parameters_sha256 == whole.parameters_sha256
    assert (resumed.examples, resumed.pushes["applied"]) == (whole.examples, 20)
    assert resumed.checkpoint is not None
    assert read_manifest(Path(resumed.checkpoint)).generation == 3


def test_job_that_is_complete_already_is_not_trained_further_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = digits_job(logdir=str(tmp_path))
    first = zmqtrain.run(job)
    with caplog.at_level(logging.WARNING):
        second = zmqtrain.run(job)
    assert "there is nothing to train" in caplog.text
    assert second.pushes["applied"] == 0
    assert second.parameters_sha256 == first.parameters_sha256
    assert second.exit_code == 0


def test_ctrl_c_saves_what_was_learned_and_the_same_call_goes_on(tmp_path: Path) -> None:
    job = digits_job(steps=10**6, logdir=str(tmp_path))
    summary = bad_end(job, on_progress=interrupt)
    assert (summary.exit_code, summary.global_step) == (130, summary.pushes["applied"])
    assert np.isnan(summary.loss)
    assert summary.checkpoint is not None
    assert read_manifest(Path(summary.checkpoint)).global_step == summary.global_step > 0
    resumed = zmqtrain.run(job.with_overrides(steps=summary.global_step + 10))
    assert resumed.pushes["applied"] == 10
    assert " steps/s over the last 10, " in "\n".join(resumed.lines())
    stopped = replace(resumed, ended="the chief says\n\x1b[2J")
    assert stopped.lines()[0].endswith(r": the chief says\n\x1b[2J")
    straight = zmqtrain.run(digits_job(steps=summary.global_step + 10))
    assert resumed.parameters_sha256 == straight.parameters_sha256


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


def test_ctrl_c_before_the_first_step_is_a_keyboard_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(saver: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.01)

    monkeypatch.setattr("zmqtrain.chief.saving.Saver.check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        zmqtrain.run(digits_job(logdir=str(tmp_path)))


def test_evaluations_on_the_way_are_of_the_steps_asked_for(tmp_path: Path) -> None:
    zmqtrain.run(digits_job(steps=10, logdir=str(tmp_path)))
    summary = zmqtrain.run(digits_job(steps=40, evaluate_every=5, logdir=str(tmp_path)))
    assert [row["step"] for row in summary.evaluations] == [15, 20, 25, 30, 35, 40]
    assert summary.evaluations[-1] == {"step": 40} | summary.measures
    assert json.loads(summary.json())["evaluations"] == list(summary.evaluations)


def test_checkpoints_are_saved_on_the_way(tmp_path: Path) -> None:
    saved: list[int] = []

    def note(status: Status) -> None:
        saved.append(len(list((tmp_path / "checkpoints").glob("step-*"))))

    zmqtrain.run(digits_job(steps=800, logdir=str(tmp_path), save_secs=0.001), on_progress=note)
    assert max(saved) > 0


class Waiting:
    """A policy that waits for a second worker."""

    spec = "test"
    coordinated = True
    step_per_push = True
    staleness_bound = None

    def __init__(self, options: str) -> None:
        pass

    def start(self, version: int, workers: int) -> None:
        pass

    def join(self, worker: int) -> list[Decision]:
        return []

    def leave(self, worker: int) -> list[Decision]:
        return []

    def push(self, worker: int) -> list[Decision]:
        return []

    def drain(self) -> list[Decision]:
        return []

    def held(self) -> list[Held]:
        return [Held(0, "it wants company", ())]


def test_policy_that_would_wait_for_other_workers_for_ever_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zmqtrain.exchanges.local.make_policy", Waiting)
    summary = bad_end(digits_job())
    assert summary.exit_code == ExitCode.PEER_LOST
    assert "it wants company" in summary.ended


def test_what_has_changed_since_the_checkpoint_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = digits_job(steps=5, logdir=str(tmp_path))
    saved = zmqtrain.run(before)
    after = before.model_copy(update={"optimizer": SGD(0.25), "batch_size": 20, "steps": 8})
    with caplog.at_level(logging.WARNING, "zmqtrain.chief"):
        resumed = zmqtrain.run(after)
    said = [record for record in caplog.records if record.name == "zmqtrain.chief.saving"]
    (told,) = (record.message for record in said if record.levelno >= logging.WARNING)
    for change in ("batch_size: 50 then, 20 now", "Adam", "SGD", "m, v"):
        assert change in told
    assert "steps" not in told
    assert resumed.examples == saved.examples + 3 * 20
