"""`zmqtrain status --logdir` of runs that are over, and of those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden import Snapshot
from tests.transcript import performed
from zmqtrain.chief.run_record import RECORD_FILE
from zmqtrain.config.run_file import RunningJob
from zmqtrain.observe.outcome import FILE, Outcome
from zmqtrain.protocol.status import Status
from zmqtrain.store.logdir import claimed
from zmqtrain.wire.control import GetStatus

COMMANDS = ("status", "why", "top", "status --json", "save", "stop")
OUTCOMES = {
    "completed": Outcome("job.py", "step 9 of 9 is done", 0, 1.79e9, 9, 0.5, {"accuracy": 0.9}),
    "stopped": Outcome("job.py", "stopped by a signal", 130, 1.79e9, 7, 0.5),
    "out of room": Outcome("job.py", "no space left on device", 74, 1.79e9),
}


@pytest.fixture
def logdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("run")


def with_checkpoint(logdir: Path) -> None:
    (logdir / "checkpoints" / "step-00000007").mkdir(parents=True)


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("name", OUTCOMES)
def test_every_command_tells_how_a_run_ended(
    name: str, logdir: Path, snapshot: Snapshot, capsys: pytest.CaptureFixture[str]
) -> None:
    with_checkpoint(logdir)
    (logdir / FILE).write_text(OUTCOMES[name].text())
    snapshot(performed(capsys, *(f"{command} --logdir run" for command in COMMANDS)))


def test_killed_run_has_its_newest_checkpoint(
    logdir: Path, snapshot: Snapshot, capsys: pytest.CaptureFixture[str]
) -> None:
    with_checkpoint(logdir)
    snapshot(performed(capsys, "status --logdir run", "why --logdir run"))


def test_run_without_a_checkpoint_is_known_by_its_record(
    logdir: Path, snapshot: Snapshot, capsys: pytest.CaptureFixture[str]
) -> None:
    logdir.mkdir()
    (logdir / RECORD_FILE).write_text("{}")
    snapshot(performed(capsys, "status --logdir run", "why --logdir run"))


def test_directory_without_a_run_is_refused(
    logdir: Path, snapshot: Snapshot, capsys: pytest.CaptureFixture[str]
) -> None:
    logdir.mkdir()
    snapshot(performed(capsys, "status --logdir run", "status name --logdir run --ps a:1"))


def test_running_job_is_found_by_its_logdir(
    logdir: Path,
    ps: Any,
    training: Status,
    jobs: list[RunningJob],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ps.replies[GetStatus] = [training]
    jobs[:] = [
        RunningJob(1, "other.py", ("127.0.0.1:1",), "chief 0"),
        RunningJob(2, "job.py", ("127.0.0.1:2222",), "chief 0", logdir=str(logdir.absolute())),
    ]
    with_checkpoint(logdir)
    (logdir / FILE).write_text(OUTCOMES["completed"].text())  # of the run before
    assert "= 0" in performed(capsys, "status --logdir run")
    assert [address for address, *_ in ps.asked] == ["127.0.0.1:2222"]
    jobs.clear()
    with claimed(str(logdir)):
        refused = performed(capsys, "status --logdir run")
    assert "a job runs with run, on another host or in a process alone" in refused
