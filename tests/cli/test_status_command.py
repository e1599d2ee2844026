"""`zmqtrain status`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from zmqtrain.cli.main import main
from zmqtrain.cli.output import text_of
from zmqtrain.cli.status import status_view
from zmqtrain.errors import ExitCode
from zmqtrain.protocol.status import Status
from zmqtrain.wire.messages import GetStatus


def lines(status: Status) -> list[str]:
    return text_of(status_view(status, "digits.py")).splitlines()


def line(status: Status, name: str) -> str:
    """Return the line of a figure or a task."""
    return next(text for text in lines(status) if text.strip().startswith(name))


@pytest.mark.usefixtures("utc")
def test_status_is_a_few_figures_and_a_table(training: Status) -> None:
    assert text_of(status_view(training, "digits.py at 127.0.0.1:2222"), 80).splitlines() == [
        "digits.py at 127.0.0.1:2222",
        "  state      training for 12 s",
        "  step       1200 of 3000 (40.0 %), 100 steps/s, about 18 s left",
        "  strategy   parameter-server, exchange direct",
        "  policy     sync-replicas",
        "  loss       0.2500 at the last push",
        "  examples   120000",
        "  pushes     2400 applied, 3 dropped, 1 duplicate, 0 refused",
        "  staleness  mean 0.50, p50 0, p99 2, max 4 versions",
        "",
        "task      state      step  behind    loss  holds           silent  joined",
        "ps 0      serving    1200       -       -  16.4 kB          0.0 s  -",
        "ps 1      alive      1198       -       -  2.9 kB           42 ms  Fri 02:00",
        "chief 0   alive         -       -       -  saved 800        42 ms  Fri 02:00",
        "worker 0  waiting    1205       0  0.2500  2410             42 ms  Fri 02:00",
        "worker 1  computing  1195       3  0.5000  2411, 2412, +3   42 ms  Fri 02:00",
    ]


def test_stall_is_told_in_place_of_a_speed_and_an_end(training: Status) -> None:
    stalled = replace(training, idle_s=42.0)
    assert text_of(status_view(stalled, "digits.py"), 80).splitlines()[1:3] == [
        "  state      training for 12 s, no step for 42 s",
        "  step       1200 of 3000 (40.0 %)",
    ]


@pytest.mark.parametrize(("steps_per_second", "idle_s"), [(100.0, 4.0), (0.1, 80.0)])
def test_step_under_way_is_no_stall(
    training: Status, steps_per_second: float, idle_s: float
) -> None:
    slow = replace(training, steps_per_second=steps_per_second, idle_s=idle_s)
    assert "no step" not in text_of(status_view(slow, "digits.py"), 80)


def test_failure_to_save_is_told_until_a_checkpoint_is_saved(training: Status) -> None:
    failing = replace(training, save_failure="no room")
    line = text_of(status_view(failing, "digits.py"), 80).splitlines()[1]
    assert line == "  state      training for 12 s; the last checkpoint failed: no room"


def test_group_and_rosters_are_told_where_there_are_any(training: Status) -> None:
    changed = replace(training, group=2, group_members=(1, 2), rosters=7)
    lines = text_of(status_view(changed, "digits.py"), 80).splitlines()
    assert lines[9:11] == ["  group      2 (worker 1, worker 2)", "  rosters    7"]


@pytest.mark.parametrize(
    ("lanes", "shown"),
    [("", "-"), ("tcp", "tcp"), ("shm,shm,shm", "shm"), ("shm,tcp,tcp", "shm,tcp,tcp")],
)
def test_lanes_are_told_in_turn_only_if_they_differ(
    training: Status, lanes: str, shown: str
) -> None:
    *others, worker = training.tasks
    status = replace(training, tasks=(*others, replace(worker, lanes=lanes)))
    assert line(status, "worker 1").split()[-3] == shown


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"initialised": False}, "waiting for the chief to begin the job"),
        ({"save_wanted": True}, "training for 12 s, checkpoint requested"),
        ({"step": 2200}, "training for 12 s since step 1000"),
        ({"stop": "step 3000 of 3000 is done"}, "done: step 3000 of 3000 is done"),
        ({"failure": "11 gradients held NaN", "stop": "x"}, "failed: 11 gradients held NaN"),
    ],
)
def test_state_says_where_the_job_is(training: Status, change: dict[str, Any], state: str) -> None:
    assert line(replace(training, **change), "state") == f"  state      {state}"


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


def test_worker_is_as_far_behind_as_the_policy_says_whatever_its_steps_are(
    training: Status,
) -> None:
    *others, first, second = training.tasks
    gone = replace(first, state="left", step=9000, behind=None)
    status = replace(training, tasks=(*others, gone, second))
    assert line(status, "worker 0").split()[2:5] == ["left", "9000", "-"]
    assert line(status, "worker 1").split()[2:5] == ["computing", "1195", "3"]


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
