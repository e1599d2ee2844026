"""`zmqtrain status`."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from zmqtrain.cli.main import main
from zmqtrain.cli.output import text_of
from zmqtrain.cli.status import status_view
from zmqtrain.errors import ExitCode, PeerLostError
from zmqtrain.run_file import RunningJob
from zmqtrain.wire.messages import GetStatus, Status


def lines(status: Status) -> list[str]:
    return text_of(status_view(status, "digits.py")).splitlines()


def line(status: Status, name: str) -> str:
    """Return the line of a figure or a task."""
    return next(text for text in lines(status) if text.strip().startswith(name))


@pytest.mark.usefixtures("utc")
def test_status_fits_a_terminal_of_100_columns(training: Status) -> None:
    console = Console(width=100, file=StringIO())
    with console.capture() as capture:
        console.print(status_view(training, "digits.py at 127.0.0.1:2222"))
    assert [text.rstrip() for text in capture.get().splitlines()] == [
        "digits.py at 127.0.0.1:2222",
        "  state      training for 12 s",
        "  step       1200 of 3000 (40.0 %), 100 steps/s, about 18 s left",
        "  policy     sync-replicas",
        "  loss       0.2500 at the last push",
        "  examples   120000",
        "  pushes     2400 applied, 3 dropped, 1 duplicate, 0 refused",
        "  staleness  mean 0.50, p50 0, p99 2, max 4 versions",
        "",
        "task      state      step  behind    loss  holds           silent  joined     process   metrics",
        "ps 0      serving    1200       -       -  16.4 kB          0.0 s  -          host:100  127.0.0.1:9410",
        "ps 1      alive      1198       -       -  2.9 kB           42 ms  Fri 02:00  host:100  127.0.0.1:9410",
        "chief 0   alive         -       -       -  saved 800        42 ms  Fri 02:00  host:100  127.0.0.1:9410",
        "worker 0  waiting    1205       0  0.2500  2410             42 ms  Fri 02:00  host:100  127.0.0.1:9410",
        "worker 1  computing  1195      10  0.5000  2411, 2412, +3   42 ms  Fri 02:00  host:100  127.0.0.1:9410",
    ]


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"initialised": False}, "waits for the chief to begin the job"),
        ({"save_wanted": True}, "training for 12 s, a checkpoint is asked for"),
        ({"stop": "step 3000 of 3000 is done"}, "done: step 3000 of 3000 is done"),
        ({"failure": "11 gradients held NaN", "stop": "x"}, "failed: 11 gradients held NaN"),
    ],
)
def test_state_says_where_the_job_is(training: Status, change: dict[str, Any], state: str) -> None:
    assert line(replace(training, **change), "state") == f"  state      {state}"


def test_policy_that_is_about_to_change_is_told(training: Status) -> None:
    assert line(replace(training, switching="hogwild"), "policy").endswith(
        "sync-replicas, changes to hogwild at the next barrier"
    )


@pytest.mark.parametrize(
    ("change", "progress"),
    [
        ({"step": 0, "steps_per_second": 0.0}, "0 of 3000 (0.0 %)"),
        ({"step": 3000}, "3000 of 3000 (100.0 %), 100 steps/s"),
        ({"failure": "diverged"}, "1200 of 3000 (40.0 %), 100 steps/s"),
    ],
)
def test_remaining_time_is_told_only_if_there_is_one(
    training: Status, change: dict[str, Any], progress: str
) -> None:
    assert line(replace(training, **change), "step") == f"  step       {progress}"


def test_loss_before_the_first_push_is_a_dash(training: Status) -> None:
    assert line(replace(training, loss=float("nan")), "loss").endswith("- at the last push")


def test_worker_that_left_neither_lags_nor_leads(training: Status) -> None:
    *others, first, second = training.tasks
    gone = replace(first, state="left", step=9000)
    status = replace(training, tasks=(*others, gone, second))
    assert line(status, "worker 0").split()[2:5] == ["left", "9000", "-"]
    assert line(status, "worker 1").split()[2:5] == ["computing", "1195", "0"]


def test_job_without_tasks_has_a_status(training: Status) -> None:
    assert lines(replace(training, tasks=()))[-1].startswith("task ")


def test_json_is_every_field_of_the_status(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies[GetStatus] = [training]
    assert main(["status", "--json"]) == ExitCode.OK
    out = capsys.readouterr().out
    status = json.loads(out)
    assert out.count("\n") == 1
    assert (status["job"], status["ps"]) == ("digits.py", "127.0.0.1:2222")
    assert status.keys() - {"job", "ps"} == set(Status.__dataclass_fields__)
    assert status["tasks"][0]["loss"] is None
    assert status["waits"][1]["until_s"] == 296.75


def test_watch_ends_with_the_job(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    done = replace(training, event=4, step=3000, stop="step 3000 of 3000 is done")
    ps.replies[GetStatus] = [training, replace(training, step=2000), done]
    assert main(["status", "--watch"]) == ExitCode.OK
    out = capsys.readouterr().out
    steps = [text.split()[1] for text in out.splitlines() if text.startswith("  step ")]
    assert steps == ["1200", "2000", "3000"]
    assert "the job has ended" not in out  # the state says how
    # Ps 0 holds the answer back for up to a second, or until something happens.
    assert ps.questions(GetStatus) == [GetStatus(), GetStatus(3, 1.0), GetStatus(3, 1.0)]
    assert [timeout_s for _, _, timeout_s in ps.asked] == [5.0, 6.0, 6.0]


def test_watch_writes_a_json_object_a_line(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies[GetStatus] = [training, replace(training, failure="diverged")]
    assert main(["status", "--watch", "--json"]) == ExitCode.OK
    objects = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [status["failure"] for status in objects] == ["", "diverged"]


def test_watch_ends_calmly_when_the_chief_has_gone(
    ps: Any, jobs: list[RunningJob], training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies[GetStatus] = [training, PeerLostError("silence")]
    ps.on_error = jobs.clear
    assert main(["status", "--watch"]) == ExitCode.OK
    assert capsys.readouterr().out.endswith("the job has ended\n")


def test_watch_tells_when_a_job_elsewhere_falls_silent(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies[GetStatus] = [training, PeerLostError("silence")]
    assert main(["status", "--watch", "--ps", "far:2222"]) == ExitCode.PEER_LOST
    assert capsys.readouterr().err == "error: silence\n"


def test_watch_ends_with_ctrl_c_quietly(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies[GetStatus] = [training, KeyboardInterrupt()]
    assert main(["status", "--watch"]) == ExitCode.OK
    told = capsys.readouterr()
    assert told.err == ""
