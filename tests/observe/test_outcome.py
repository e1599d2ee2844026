"""Outcome of a run that has ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import zmqtrain
from zmqtrain import Job
from zmqtrain.callbacks import LambdaCallback
from zmqtrain.data import NoisyLine
from zmqtrain.errors import CheckpointError, ConfigError, PeerLostError
from zmqtrain.models import LinearRegression
from zmqtrain.observe.outcome import FILE, Outcome, outcome_in, recorded
from zmqtrain.observe.summary import told_end
from zmqtrain.optim import SGD


def test_run_leaves_its_outcome_in_the_logdir(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("of the run before")
    job = Job(
        model=LinearRegression(),
        data=NoisyLine(slope=2.0, noise=0.1),
        optimizer=SGD(0.1),
        batch_size=20,
        steps=5,
        logdir=str(tmp_path),
    )
    summary = zmqtrain.run(job)
    outcome = outcome_in((tmp_path / FILE).read_text())
    assert outcome is not None
    assert (outcome.exit_code, outcome.step, outcome.ended) == (0, 5, "step 5 of 5 is done")
    assert outcome.checkpoint == summary.checkpoint
    assert outcome.measures["loss"] == pytest.approx(summary.loss)
    assert (
        told_end("stopped", summary.told()) == f"stopped at step 5; checkpoint {summary.checkpoint}"
    )
    assert "exit_code=0" in repr(summary)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"workers": 2, "ps": 0}])
def test_outcome_of_the_run_before_is_forgotten_when_a_run_begins(
    options: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text("of the run before")
    seen = []
    job = Job(
        model=LinearRegression(),
        data=NoisyLine(slope=2.0, noise=0.1),
        optimizer=SGD(0.1),
        epochs=1,
        logdir=str(tmp_path),
        callbacks=[
            LambdaCallback(on_epoch_end=lambda *_: seen.append((tmp_path / FILE).read_text()))
        ],
    )
    zmqtrain.run(job, **options)
    assert seen == [""]


@pytest.mark.parametrize(
    ("error", "has_ended", "code"),
    [
        (ConfigError("no"), True, 2),
        (CheckpointError("no"), True, 74),
        (PeerLostError("no"), False, 138),
        (PeerLostError("no"), True, 0),
        (MemoryError("no"), True, 2),
        (ValueError("no"), True, 1),
    ],
)
def test_error_is_recorded_unless_a_restart_may_help_and_the_job_had_ended(
    error: Exception, has_ended: bool, code: int, tmp_path: Path
) -> None:
    before = Outcome("job.py", "no step is left", 0, 1.5).text() if has_ended else "of another"
    files = tmp_path / "termination-log", tmp_path / FILE
    for path in files:
        path.write_text(before)
    with (
        pytest.raises(type(error)),
        recorded("job.py", str(tmp_path), str(files[0]), lambda: None),
    ):
        raise error
    for path in files:
        found = outcome_in(path.read_text())
        assert found is not None
        assert found.exit_code == code
        assert found.ended.removeprefix("a bug: ValueError: ").startswith("no")


def test_full_logdir_keeps_no_outcome_from_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").touch()  # where a logdir would have to be
    file = tmp_path / "termination-log"
    with (
        pytest.raises(ConfigError),
        recorded("job.py", str(tmp_path / "full"), str(file), lambda: None),
    ):
        raise ConfigError("no")
    assert outcome_in(file.read_text()) is not None
    assert "cannot show how the job ended" in caplog.text


@pytest.mark.parametrize("letter", ["x", "\U0001f600"])
def test_file_of_the_engine_is_written_in_place_and_is_small(letter: str, tmp_path: Path) -> None:
    """Kubernetes mounts it, and keeps 4096 bytes."""
    file = tmp_path / "termination-log"
    file.write_text("x" * 9000)
    before = file.stat().st_ino
    with pytest.raises(ConfigError), recorded("job.py", None, str(file), lambda: None):
        raise ConfigError(letter * 9000)
    assert file.stat().st_ino == before
    assert file.stat().st_size < 4096
    assert outcome_in(file.read_text()) is not None


def test_job_ends_although_its_outcome_cannot_be_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path, tmp_path / "fifo", tmp_path / "nowhere" / "file"):
        with (
            pytest.raises(ConfigError, match=r"^no$"),
            recorded("job.py", None, str(file), lambda: None),
        ):
            raise ConfigError("no")


ENDLESS = '{"job": "j", "ended": "e", "exit_code": 0, "at": 1e300}'


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', "\x00", '{"job": "j"}', ENDLESS])
def test_other_text_is_no_outcome(text: str) -> None:
    assert outcome_in(text) is None


def test_outcome_is_read_as_it_was_written() -> None:
    outcome = Outcome("j", "done", 0, 1.5, 7, float("nan"), {"loss": float("inf"), "auc": 0.5}, "c")
    found = outcome_in(outcome.text())
    assert found == Outcome("j", "done", 0, 1.5, 7, None, {"loss": None, "auc": 0.5}, "c")
    assert json.loads(outcome.text())["train_loss"] is None
