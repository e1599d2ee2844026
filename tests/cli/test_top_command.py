"""`zmqtrain top`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.clock import StopClock
from tests.constants import Constants
from zmqtrain.cli import top
from zmqtrain.cli.main import main
from zmqtrain.config.run_file import RunningJob
from zmqtrain.errors import ExitCode, PeerLostError
from zmqtrain.protocol.status import Status
from zmqtrain.wire.control import GetStatus

AWAY = PeerLostError("silence")


@pytest.fixture
def at_once(constants: Constants) -> None:
    constants(top, REFRESH_S=0.0)


@pytest.mark.usefixtures("at_once")
def test_pipe_gets_a_line_for_each_answer_and_all_news(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    *others, last = training.tasks
    back = replace(training, tasks=(*others, replace(last, restarts=2)))
    done = replace(back, step=3000, stop="step 3000 of 3000 is done")
    ps.replies[GetStatus] = [training, AWAY, AWAY, back, done]
    assert main(["top"]) == ExitCode.OK
    told = [text[10:] for text in capsys.readouterr().out.splitlines()]
    assert [text for text in told if not text.startswith("step ")] == [
        "ps 0 does not answer",
        "ps 0 answers again",
        "worker 1 ended and was started again",
        "ended: step 3000 of 3000 is done",
    ]
    assert len([text for text in told if text.startswith("step ")]) == 3


@pytest.mark.usefixtures("at_once")
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


@pytest.mark.usefixtures("at_once")
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
    ps: Any, training: Status, stop_clock: StopClock, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_clock(top)
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
