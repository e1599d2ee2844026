"""The record of a run, and the page that `zmqtrain report` makes of it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zmqtrain
from zmqtrain.chief.run_record import MOST_SAMPLES, RECORD_FILE, RunRecord, read_record
from zmqtrain.cli.ended import with_ending
from zmqtrain.cli.main import main
from zmqtrain.data import Digits
from zmqtrain.errors import ExitCode
from zmqtrain.models import MLP
from zmqtrain.observe.outcome import FILE, Outcome
from zmqtrain.observe.summary import as_json
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
def record(clock: Clock, tmp_path: Path) -> RunRecord:
    evaluations = [{"step": 1000, "loss": 0.25, "accuracy": 0.9}]
    return RunRecord("net.py", lambda: evaluations, str(tmp_path), clock)


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
    later = RunRecord("net.py", list, clock=clock)
    later.resume(found)
    again = seen(later, clock, replace(training, step=1250))
    assert [sample[1] for sample in again["samples"]] == [1200, 1250]
    assert again["evaluations"] == found["evaluations"]
    assert again["events"][-1][1] == "the job is resumed"


async def test_lives_of_a_run_are_told_in_their_order(
    record: RunRecord, clock: Clock, training: Status, tmp_path: Path
) -> None:
    (saved, *_) = [task for task in training.tasks if task.role == "chief"]
    tasks = tuple(replace(task, step=900) if task is saved else task for task in training.tasks)
    seen(record, clock, training, replace(training, tasks=tasks))
    await record.leave()
    clock.now += 60.0
    later = RunRecord("net.py", list, str(tmp_path), clock)
    clock.now += 2.0
    forgotten = tuple(replace(task, step=0) if task is saved else task for task in training.tasks)
    seen(later, clock, replace(training, tasks=forgotten))
    async with asyncio.timeout(10):  # the record is read in a thread
        while len(later.as_dict()["events"]) < 3:
            await later.save_if_due()
            await asyncio.sleep(0)
    seen(later, clock, replace(training, tasks=tasks))
    later.miss()
    later.take(replace(training, stop="zmqtrain stop"), ended="stopped by zmqtrain stop")
    assert later.as_dict()["events"] == [
        (1e6 + 1, "a checkpoint of step 900 was saved"),
        (1e6 + 2, "the chief was stopped and left; the job goes on"),
        (1e6 + 62, "a new chief took over"),
        (1e6 + 66, "ps 0 does not answer"),
        (1e6 + 66, "ps 0 answers again"),
        (1e6 + 66, "the job has ended: stopped by zmqtrain stop"),
    ]


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
    assert "a checkpoint of step 40 was saved" in [text for _, text in found["events"]]
    zmqtrain.run(job.with_overrides(steps=60))  # alone
    again = read_record(logdir)
    assert again is not None
    assert [sample[1] for sample in again["samples"]][-1] == 60
    assert "a checkpoint of step 60 was saved" in [text for _, text in again["events"]]


def test_page_of_a_run_whose_ps_failed_tells_how_it_ended(
    record: RunRecord, clock: Clock, training: Status, tmp_path: Path
) -> None:
    """The chief writes the record now and then, and the last time before the failure."""
    found, page = seen(record, clock, training), tmp_path / "run.html"
    assert found["ended"] is False
    (tmp_path / RECORD_FILE).write_text(as_json(found))
    (tmp_path / FILE).write_text(Outcome("net.py", "ps 0 was killed", 138, 1e6 + 9).text())
    assert main(["report", str(tmp_path), "--html", str(page)]) == ExitCode.OK
    text = page.read_text()
    assert '"ended": true' in text
    assert '"state": "failed: ps 0 was killed"' in text
    assert "the job has ended: ps 0 was killed" in text


@pytest.mark.parametrize(
    ("outcome", "is_news"),
    [
        (Outcome("fit.py", "the script failed", 1, 1e6 + 9), True),
        (Outcome("fit.py", "an earlier failure", 1, 1e6 - 9), False),
        (Outcome("fit.py", "diverged", 76, 1e6 + 9), False),
        (Outcome("fit.py", "step 40 of 40 is done", 0, 1e6 + 9), False),
    ],
)
def test_end_of_a_script_after_its_training_is_told_once(
    outcome: Outcome, is_news: bool, record: RunRecord, training: Status, tmp_path: Path
) -> None:
    record.take(replace(training, stop="diverged"), ended="diverged")
    (tmp_path / FILE).write_text(outcome.text())
    found = record.as_dict()
    ended = with_ending(found, str(tmp_path))
    assert (ended["state"] == "failed: the script failed") == is_news
    assert len(ended["events"]) == len(found["events"]) + is_news


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


def test_page_in_a_directory_that_is_not_there_is_refused(
    record: RunRecord,
    clock: Clock,
    training: Status,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / RECORD_FILE).write_text(as_json(seen(record, clock, training)))
    page = tmp_path / "no" / "run.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == ExitCode.USAGE
    assert f"{page} cannot be written: No such file" in capsys.readouterr().err


needs_browser = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs chromium on PATH"
)


def hostile(status: Status) -> Status:
    return replace(status, step=1300, policy=HOSTILE)


def browsed(record: dict[str, Any], directory: Path) -> str:
    """Return the page of a record as a browser shows it."""
    (directory / RECORD_FILE).write_text(as_json(record))
    page, profile = directory / "run.html", directory / "profile"
    assert main(["report", str(directory), "--html", str(page)]) == ExitCode.OK
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}")
    command = ["chromium", *options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout


@needs_browser
def test_browser_shows_the_run_and_runs_no_text_of_it(
    record: RunRecord, clock: Clock, training: Status, tmp_path: Path
) -> None:
    shown = browsed(seen(record, clock, training, hostile(training)), tmp_path)
    assert "<title>net.py · zmqtrain</title>" in shown
    assert "worker 1 has waited" not in shown
    assert "worker 0 has waited" in shown
    assert shown.count('aria-label="Loss"') == 1


@needs_browser
def test_browser_shows_the_time_between_two_lives_as_a_gap(
    record: RunRecord, clock: Clock, training: Status, tmp_path: Path
) -> None:
    steps = [replace(training, step=1200 + second) for second in range(150)]
    found = seen(record, clock, *steps)
    clock.now += 540.0
    later = RunRecord("net.py", list, clock=clock)
    later.resume(found)
    shown = browsed(seen(later, clock, *steps), tmp_path)
    workers = shown[shown.index('aria-label="Staleness and workers"') :]
    curves = re.findall(r'<path d="([^"]*)" fill="none"', workers)
    assert [curve.count("M") for curve in curves[:2]] == [2, 2]
    assert workers.count('class="gap"') == 1
    assert "nothing was recorded for 9 min" in workers
    ticks = re.findall(r'text-anchor="middle">([^<]*)<', workers)
    assert ticks == ["0", "1 min", "2 min", "3 min", "4 min"]


@needs_browser
def test_browser_says_that_no_step_has_been_made(
    record: RunRecord, clock: Clock, training: Status, tmp_path: Path
) -> None:
    begun = replace(training, step=0, loss=math.nan, seconds=0.0)
    shown = browsed(seen(record, clock, begun, begun), tmp_path)
    assert "<h2>No step has been made yet</h2>" in shown
    assert "<h2>Loss</h2>" not in shown
