"""The record of a run, and the page that `zmqtrain report` makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zmqtrain
from zmqtrain.chief.run_record import MOST_SAMPLES, RECORD_FILE, RunRecord, read_record
from zmqtrain.cli.main import main
from zmqtrain.data import Digits
from zmqtrain.errors import ExitCode
from zmqtrain.models import MLP
from zmqtrain.optim import Adam
from zmqtrain.protocol.status import Status

BAD_EVENTS = '{"columns": [], "samples": [], "events": ["worker 0 left"], "evaluations": []}'
HOSTILE = "</script><script>document.title = 'taken'</script>"


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def record(clock: Clock) -> RunRecord:
    return RunRecord("net.py", lambda: [{"step": 1000, "loss": 0.25, "accuracy": 0.9}], clock)


def seen(record: RunRecord, clock: Clock, *statuses: Status) -> dict[str, Any]:
    """Show the statuses to the record, one a second; return it as it then is."""
    for status in statuses:
        record.take(status)
        clock.now += 1.0
    return record.as_dict()


def test_record_has_figures_by_time_and_how_the_job_stands(
    record: RunRecord, clock: Clock, training: Status
) -> None:
    found = seen(record, clock, training, replace(training, step=1300, policy="hogwild"))
    columns = [dict(zip(found["columns"], sample, strict=True)) for sample in found["samples"]]
    assert [(each["step"], each["speed"]) for each in columns] == [(1200, None), (1300, 100.0)]
    assert [text for _, text in found["events"]] == ["the policy is hogwild; it was sync-replicas"]
    assert found["evaluations"] == [{"at": 1e6, "step": 1000, "loss": 0.25, "accuracy": 0.9}]
    assert [task["name"] for task in found["tasks"]][-2:] == ["worker 0", "worker 1"]
    assert [wait["peer"] for wait in found["waits"]] == ["ps 0", "worker 1"]


def test_record_stays_small_however_long_the_run_is(
    record: RunRecord, clock: Clock, training: Status
) -> None:
    found = seen(record, clock, *(replace(training, step=step) for step in range(5000)))
    assert len(found["samples"]) <= MOST_SAMPLES
    times = [sample[0] for sample in found["samples"]]
    assert times[0] == 1e6
    assert times[-1] > 1e6 + 4900
    assert len(json.dumps(found)) < 300_000


def test_next_life_goes_on_with_the_record(
    record: RunRecord, clock: Clock, training: Status
) -> None:
    found = seen(record, clock, training)
    later = RunRecord("net.py", lambda: [], clock)
    later.resume(found)
    again = seen(later, clock, replace(training, step=1250))
    assert [sample[1] for sample in again["samples"]] == [1200, 1250]
    assert again["evaluations"] == found["evaluations"]
    assert again["events"][-1][1] == "the job is resumed"


def test_run_leaves_a_record_in_its_logdir_and_report_makes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logdir, page = tmp_path / "run", tmp_path / "run.html"
    job = zmqtrain.Job(
        model=MLP(64, 8, 10), data=Digits(), optimizer=Adam(0.01), steps=40, logdir=str(logdir)
    )
    zmqtrain.run(job, workers=2)
    assert main(["report", str(logdir), "--html", str(page)]) == ExitCode.OK
    assert "accuracy" in page.read_text()
    found = read_record(logdir)
    assert found is not None
    assert found["samples"][-1][1] == 40
    assert found["evaluations"][-1]["step"] == 40
    zmqtrain.run(job.with_overrides(steps=60))  # alone
    again = read_record(logdir)
    assert again is not None
    assert [sample[1] for sample in again["samples"]][-1] == 60


@pytest.mark.parametrize(
    "content", [None, "no json", "{}", '{"samples": 3}', BAD_EVENTS, "x" * (5 << 20)]
)
def test_logdir_without_a_record_is_refused(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / RECORD_FILE).write_text(content)
    assert main(["report", str(tmp_path)]) == ExitCode.USAGE
    assert "expected the logdir of a job that has trained" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium on PATH")
def test_browser_shows_the_run_and_runs_no_text_of_it(
    record: RunRecord, clock: Clock, training: Status, tmp_path: Path
) -> None:
    hostile = replace(training, step=1300, policy=HOSTILE)
    (tmp_path / RECORD_FILE).write_text(json.dumps(seen(record, clock, training, hostile)))
    page = tmp_path / "run.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == ExitCode.OK
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile")
    done = subprocess.run(
        ["chromium", *options, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "<title>net.py · zmqtrain</title>" in done.stdout
    assert "worker 1 has waited" not in done.stdout
    assert "worker 0 has waited" in done.stdout
    assert done.stdout.count('aria-label="Loss"') == 1
