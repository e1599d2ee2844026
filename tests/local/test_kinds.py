"""Every run inside this process: alone, on several devices, with ps and without."""

from __future__ import annotations

import logging
import math
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
from tests.integration.jobs import digits_job
from zmqtrain import Job, Trainer
from zmqtrain.callbacks import LambdaCallback
from zmqtrain.data import Digits
from zmqtrain.errors import ConfigError, RunFailedError
from zmqtrain.models import MLP
from zmqtrain.observe.summary import parameters_sha256
from zmqtrain.optim import LAMB, SGD, Muon
from zmqtrain.protocol.status import Status
from zmqtrain.store.manifest import read_manifest

KINDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "devices": {"devices": "cpu:0,cpu:1"},
    "two ps": {"workers": 2, "ps": 2},
    "no ps": {"workers": 2, "ps": 0},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def run_of(kind: dict[str, Any], **fields: Any) -> tuple[Job, dict[str, Any]]:
    """Return a job of sync-replicas, and how it is run."""
    size = {name: kind[name] for name in ("workers", "ps") if name in kind}
    job = digits_job(policy="sync-replicas", steps=40)
    return job.with_overrides(**{"devices": kind.get("devices", "")} | fields), size


def test_copies_that_muon_trains_have_the_same_bits_wherever_they_lie(tmp_path: Path) -> None:
    job = digits_job(policy="sync-replicas", steps=6, batch_size=16)
    job = job.with_overrides(optimizer=Muon(), groups={"*bias": {"optimizer": LAMB(0.1)}})
    found = [
        parameters_sha256(zmqtrain.run(each, workers=3, ps=0).parameters)
        for each in (
            job.with_overrides(copies=2, exchange="direct"),
            job.with_overrides(copies=2, exchange="to-one", logdir=str(tmp_path), steps=2),
            job.with_overrides(exchange="one-shot", logdir=str(tmp_path)),
        )
    ]
    assert found[0] == found[2]  # the last has gone on where the second stopped


def interrupt(status: Status) -> None:
    """Press Ctrl-C once the job has made steps."""
    if status.step and not status.stop:
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_saves_what_was_learned_and_the_same_call_goes_on(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    job, size = run_of(kind, steps=10**6, logdir=str(tmp_path))
    summary = bad_end(job, **size, on_progress=interrupt)
    assert (summary.ended, summary.exit_code) == ("stopped by a signal", 130)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert summary.pushes["applied"] == summary.global_step * size.get("workers", 1)
    assert np.isnan(summary.loss)
    assert summary.checkpoint is not None
    assert read_manifest(Path(summary.checkpoint)).global_step == summary.global_step > 0
    steps = summary.global_step + 10
    resumed = zmqtrain.run(job.with_overrides(steps=steps), **size)
    assert resumed.pushes["applied"] == 10 * size.get("workers", 1)
    if "ps" not in kind:  # else workers make steps in bursts
        assert " steps/s over the last 10, " in "\n".join(resumed.lines())
    stopped = replace(resumed, ended="the chief says\n\x1b[2J")
    assert stopped.lines()[0].endswith(r": the chief says\n\x1b[2J")
    straight = zmqtrain.run(job.with_overrides(steps=steps, logdir=""), **size)
    assert resumed.parameters_sha256 == straight.parameters_sha256


def test_job_that_is_complete_already_is_not_trained_further_and_that_is_logged(
    kind: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, size = run_of(kind, logdir=str(tmp_path))
    first = zmqtrain.run(job, **size)
    with caplog.at_level(logging.WARNING):
        second = zmqtrain.run(job, **size)
    assert "there is nothing to train" in caplog.text
    assert (second.pushes["applied"], second.exit_code) == (0, 0)
    assert second.parameters_sha256 == first.parameters_sha256
    assert second.measures == first.measures


def test_evaluations_are_of_the_steps_asked_for_also_after_a_resume(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    job, size = run_of(kind, steps=10, logdir=str(tmp_path))
    zmqtrain.run(job, **size)
    summary = zmqtrain.run(job.with_overrides(steps=40, evaluate_every=5), **size)
    steps = [row["step"] for row in summary.evaluations]
    assert steps == sorted({*steps, 40})
    assert set(steps) <= {15, 20, 25, 30, 35, 40}
    if not size:  # a cluster trains on meanwhile
        assert len(steps) == 6
    assert summary.evaluations[-1] == {"step": 40} | summary.measures


def test_checkpoints_are_saved_while_the_job_runs(kind: dict[str, Any], tmp_path: Path) -> None:
    def stop_at_a_checkpoint(status: Status) -> None:
        if any(tmp_path.glob("checkpoints/step-*")):
            interrupt(status)

    job, size = run_of(kind, steps=10**5, logdir=str(tmp_path), save_secs=0.001)
    assert bad_end(job, **size, on_progress=stop_at_a_checkpoint).exit_code == 130


def test_last_checkpoint_is_uploaded_and_begins_a_job_on_another_host(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("fsspec")
    upload = f"file://{tmp_path}/bucket"
    job, size = run_of(kind, logdir=str(tmp_path / "here"), save_steps=15, upload=upload)
    zmqtrain.run(job, **size)
    after = job.with_overrides(logdir=str(tmp_path / "there"), steps=50)
    summary = zmqtrain.run(after, **size)
    assert (tmp_path / "there/checkpoints/step-00000040/manifest.json").exists()
    assert summary.ended == "step 50 of 50 is done"


def test_job_by_steps_calls_back_and_saves_after_each_number_of_steps(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    calls: list[Any] = []

    def note(step: int, logs: Any) -> None:
        model = by_step.model
        is_measured = math.isfinite(logs["loss"]) and 0 <= logs["accuracy"] <= 1
        calls.append((step, model.step, model.examples, is_measured, model.get_weights()[0].shape))

    by_step = LambdaCallback(
        every_steps=10,
        on_steps=note,
        on_epoch_end=lambda epoch, logs: calls.append((epoch, {*logs})),
        on_test_end=lambda logs: calls.append(by_step.model.step),
    )
    options = {"save_steps": 10, "evaluate_every": 15, "keep_checkpoints": 9}
    job, size = run_of(kind, steps=40, logdir=str(tmp_path), callbacks=[by_step], **options)
    summary = zmqtrain.run(job, **size)
    by_steps = [call for call in calls if isinstance(call, tuple) and len(call) > 2]
    steps, _, examples, is_measured, shapes = map(list, zip(*by_steps, strict=True))
    assert steps == [call[1] for call in by_steps] and all(is_measured)
    assert sum(examples) == summary.examples and shapes[0] == (64, 32)
    saved = sorted(int(path.name[5:]) for path in tmp_path.glob("checkpoints/step-*"))
    if size:  # a chief may come late
        for found in (steps, saved):
            assert len({step // 10 for step in found}) == len(found) and found[-1] == 40
    else:
        assert steps == saved == [10, 20, 30, 40]
        assert [call for call in calls if isinstance(call, int)] == [15, 30, 40]
    assert calls[-1] == (0, {"loss", "accuracy", "val_loss", "val_accuracy"})
    assert summary.history.epoch == [0]
    assert summary.ended == "step 40 of 40 is done"


def test_what_has_changed_since_the_checkpoint_is_told_in_one_line(
    kind: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, size = run_of(kind, steps=5, logdir=str(tmp_path))
    zmqtrain.run(job, **size)
    after = job.model_copy(update={"optimizer": SGD(0.25), "batch_size": 20, "steps": 8})
    with caplog.at_level(logging.WARNING, "zmqtrain.chief"):
        zmqtrain.run(after, **size)
    said = [record for record in caplog.records if record.name == "zmqtrain.chief.saving"]
    (told,) = (record.message for record in said if record.levelno >= logging.WARNING)
    for change in ("batch_size: 50 then, 20 now", "Adam", "SGD", "m, v"):
        assert change in told
    assert "steps" not in told


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ("on_epoch_begin", r"on_epoch_begin\(\).*no space left"),
        ("on_train_batch_end", r"on_train_batch_end\(\).*no space left"),
        ("on_epoch_end", r"on_epoch_end\(\).*no space left"),
        ("on_train_batch_end", "looks at the weights within an epoch"),
        ("on_steps", "sets weights within an epoch"),
    ],
)
def test_callback_that_fails_ends_the_run_with_the_job_saved(
    kind: dict[str, Any], hook: str, text: str, tmp_path: Path
) -> None:
    def fail(number: int, logs: Any) -> None:
        if number >= 1:
            if "space" in text:
                raise OSError("no space left")
            callback.model.set_weights(callback.model.get_weights())

    callback = LambdaCallback(every_steps=1, **{hook: fail})
    trainer = Trainer(MLP(64, 16, 10), SGD(0.1), logdir=tmp_path, **kind)
    with pytest.raises(RunFailedError, match=text) as caught:
        trainer.fit(Digits(), epochs=3, callbacks=[callback], verbose=False)
    summary = caught.value.summary
    assert (caught.value.exit_code, summary.exit_code) == (ConfigError.exit_code,) * 2
    assert summary.checkpoint is not None and summary.global_step > 0
    assert summary.measures == {}


def test_nothing_is_left_running_after_a_run(kind: dict[str, Any]) -> None:
    before = set(threading.enumerate())
    job, size = run_of(kind, steps=20)
    zmqtrain.run(job, **size)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)  # one that waits on a board looks again within a second
    assert set(threading.enumerate()) <= before
