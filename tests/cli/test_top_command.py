"""`zmqtrain top`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tests.cli.conftest import task
from zmqtrain.cli import top
from zmqtrain.cli.main import main
from zmqtrain.cli.output import text_of
from zmqtrain.cli.top_view import (
    OTHER_ROWS,
    PHASES,
    Watched,
    news_between,
    phase_bar,
    spent_s,
    top_view,
)
from zmqtrain.config.run_file import RunningJob
from zmqtrain.errors import ExitCode, PeerLostError
from zmqtrain.protocol.status import Status
from zmqtrain.wire.messages import GetStatus

AWAY = PeerLostError("silence")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "REFRESH_S", 0.0)


def later(status: Status, **changes: Any) -> Status:
    """Return this status some steps later, in which worker 0 computed and worker 1 waited."""
    *others, first, second = status.tasks
    moved = (
        replace(first, step=first.step + 100, phases_s=(0.0, 0.0, 4.0, 0.0, 0.0, 0.0)),
        replace(second, step=second.step + 50, phases_s=(1.0, 0.0, 0.0, 0.0, 0.0, 3.0), restarts=2),
    )
    values: dict[str, Any] = {"step": 1400, "examples": 140000, "tasks": (*others, *moved)}
    return replace(status, seconds=14.0, **values | changes)


def watched(*statuses: Status | None) -> Watched:
    """Return what is known of a job after these answers, two seconds apart."""
    result = Watched()
    for number, status in enumerate(statuses):
        result.take(status, 2.0 * number)
    return result


def lines(seen: Watched, width: int = 80, rows: int = 9, news: Sequence[str] = ()) -> list[str]:
    console = Console(file=StringIO(), width=width, height=rows + OTHER_ROWS)
    return text_of(top_view(seen, "digits.py", news, console), width).splitlines()


def test_view_fits_eighty_columns(training: Status) -> None:
    assert lines(watched(training, later(training)), news=["12:00:00  worker 1 left"]) == [
        "digits.py: training for 14 s",
        "━━━━━━━━━━━━━━━━━━╸                      1400/3000, about 16 s left",
        "100 steps/s   10000 examples/s   loss 0.2500   sync-replicas",
        "░ data 12%   ▒ pull 0%   █ compute 50%   ▓ push 0%   ▚ update 0%   · wait 38%",
        "",
        "task      state      steps/s  time of a step        behind  silent  restarts",
        "ps 0      serving       0.00                             -   0.0 s         0",
        "ps 1      alive         0.00                             -   42 ms         0",
        "chief 0   alive            -                             -   42 ms         0",
        "worker 0  waiting         50  ████████████████████       0   42 ms         0",
        "worker 1  computing       25  ░░░░░···············       3   42 ms         2",
        "worker 0 has waited 3.3 s for ps 0: it has not answered push 1205",
        "worker 0 has waited 3.2 s for worker 1: step 1200 has 1 of 2 gradients",
        "12:00:00  worker 1 left",
    ]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_view_leaves_out_what_a_narrow_terminal_has_no_room_for(
    width: int, training: Status
) -> None:
    shown = lines(watched(training, later(training)), width)
    assert all(len(text) <= width for text in shown)
    assert ("staleness" in shown[2]) == (width >= 120)
    assert shown[5].split()[:2] == ["task", "state"], "nothing above is wrapped"


def test_low_terminal_shows_the_tasks_that_others_may_wait_for(training: Status) -> None:
    gone = task("worker 2", "left", 7)
    seen = watched(replace(training, tasks=(*training.tasks, gone)))
    shown = lines(seen, rows=5)
    begin = next(number for number, text in enumerate(shown) if text.startswith("task "))
    assert [text.split()[:2] for text in shown[begin + 1 : begin + 3]] == [
        ["worker", "2"],
        ["worker", "1"],
    ]
    assert shown[begin + 6] == "and 1 task more"


def test_last_answer_stays_while_ps_0_is_away(training: Status) -> None:
    seen = watched(training, None, None)
    assert "ps 0 has not answered for 4.0 s" in lines(seen)
    assert seen.take(training, 6.0) == ["ps 0 answers again"]
    assert not any("has not answered for" in text for text in lines(seen))


@pytest.mark.parametrize(
    ("seconds", "bar"),
    [
        ((), ""),
        ((0.0, 0.0, 0.0, 0.0, 0.0, 0.0), ""),
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0), "--~~##==++.."),
        ((0.0, 0.0, 2.0, 1.0, 0.0, 0.0), "########===="),
        ((0.04, 0.0, 0.96, 0.0, 0.0, 0.0), "############"),
    ],
)
def test_bar_is_full_and_its_parts_are_the_phases(seconds: tuple[float, ...], bar: str) -> None:
    assert phase_bar(seconds, "-~#=+.", 12).plain == bar
    assert len(PHASES) == 6


@pytest.mark.parametrize(
    ("before", "now", "spent"),
    [
        ((1.0, 1.0), (1.5, 3.0), (0.5, 2.0)),
        ((), (1.5, 3.0), (1.5, 3.0)),  # no heartbeat before
        ((1.0, 1.0), (), ()),  # ps 0 has started again
        ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)),  # in the middle of a long step
        ((9.0, 1.0), (0.5, 11.0), (0.5, 11.0)),  # the worker has started again
    ],
)
def test_phases_are_those_of_the_last_seconds(
    before: tuple[float, ...], now: tuple[float, ...], spent: tuple[float, ...]
) -> None:
    worker = task("worker 0", "computing", 5)
    assert spent_s(replace(worker, phases_s=now), replace(worker, phases_s=before)) == spent


@pytest.mark.parametrize(
    ("changes", "news"),
    [
        ({}, []),
        ({"step": 1100}, ["the job went back from step 1200 to 1100"]),
        ({"group": 2, "group_members": (1, 2)}, ["group 2 (worker 1, worker 2) goes on"]),
        ({"policy": "hogwild"}, ["the policy is hogwild; it was sync-replicas"]),
        ({"worker 1": {"state": "left"}}, ["worker 1 left"]),
        ({"worker 1": {"restarts": 1}}, ["worker 1 was started again"]),
        ({"chief 0": {"step": 1200}}, ["a checkpoint of step 1200 was saved"]),
        ({"worker 2": {}}, ["worker 2 joined"]),
    ],
)
def test_news_are_what_differs(changes: dict[str, Any], news: list[str], training: Status) -> None:
    tasks = {each.task: each for each in training.tasks}
    for name in [name for name in changes if " " in name]:
        before = tasks.get(name, task(name, "computing", 0))
        tasks[name] = replace(before, **changes.pop(name))
    after = replace(training, tasks=tuple(tasks.values()), **changes)
    assert news_between(training, after) == news


def test_pipe_gets_a_line_for_each_answer_and_all_news(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    done = later(training, step=3000, stop="step 3000 of 3000 is done")
    ps.replies[GetStatus] = [training, AWAY, AWAY, later(training), done]
    assert main(["top"]) == ExitCode.OK
    told = [text[10:] for text in capsys.readouterr().out.splitlines()]
    assert [text for text in told if not text.startswith("step ")] == [
        "ps 0 does not answer",
        "ps 0 answers again",
        "worker 1 was started again",
        "done: step 3000 of 3000 is done",
    ]
    assert len([text for text in told if text.startswith("step ")]) == 3


def test_terminal_shows_the_last_state_and_how_the_job_ended(
    ps: Any,
    jobs: list[RunningJob],
    training: Status,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # has rich take the capture for a terminal
    monkeypatch.setenv("TERM", "xterm")
    ps.replies[GetStatus] = [training, AWAY]
    ps.on_error = jobs.clear
    assert main(["top"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "training for 12 s" in out
    assert out.endswith("the job has ended\n")


def test_json_is_a_status_a_line(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies[GetStatus] = [training, replace(training, failure="diverged")]
    assert main(["top", "--json"]) == ExitCode.OK
    objects = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [status["failure"] for status in objects] == ["", "diverged"]
    # Ps 0 holds the answer back until something happens, or it is time for the next one.
    assert ps.questions(GetStatus) == [GetStatus(), GetStatus(3, 0.0)]


def test_many_events_are_one_status_a_second_and_few_questions(
    ps: Any, training: Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(top, "REFRESH_S", 1.0)
    monkeypatch.setattr(top.time, "monotonic", lambda: now)
    monkeypatch.setattr(top.time, "sleep", sleep)
    events = [replace(training, event=number) for number in range(3, 12)]
    ps.replies[GetStatus] = [*events, replace(training, stop="step 3000 of 3000 is done")]
    assert main(["top", "--json"]) == ExitCode.OK
    shown = [json.loads(text)["event"] for text in capsys.readouterr().out.splitlines()]
    assert shown == [3, 9, 3]
    assert len(ps.asked) == 10


def test_ctrl_c_ends_it_quietly(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies[GetStatus] = [training, KeyboardInterrupt()]
    assert main(["top"]) == ExitCode.OK
    assert capsys.readouterr().err == ""
