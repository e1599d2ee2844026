"""Whatever a peer calls itself, a person sees one line of plain text for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType

from zmqtrain.chief.job_view import JobView
from zmqtrain.chief.progress import line
from zmqtrain.chief.status_history import StatusHistory
from zmqtrain.cli.main import main
from zmqtrain.cli.output import text_of
from zmqtrain.cli.status import status_view, why_view
from zmqtrain.cli.top_view import top_view
from zmqtrain.errors import RefusedError
from zmqtrain.protocol.status import Status
from zmqtrain.wire.control import GetStatus, RequestStop
from zmqtrain.wire.messages import Done

HOSTILE = (
    "x\n2026-11-25T12:00:00.000+00:00 ERROR ps 0: forged\r\x1b]0;title\x07\x1b[2J\x9b31m"
    "\u202egnp.exe\u2028[bold red]b[/bold red][link=http://a.b]c[/link]"
)
SHOWN = r"x\n2026-11-25T12:00:00.000+00:00 ERROR ps 0: forged\r\x1b]0;title\x07\x1b[2J\x9b31m"


def hostile(value: Any) -> Any:
    """Return a message with the hostile text in every place for a text that tasks may choose."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, tuple):
        return tuple(hostile(each) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        kept = {"role", "state"}  # the decoder, or ps 0, knows all of them
        names = [field.name for field in fields(value) if field.name not in kept]
        return replace(value, **{name: hostile(getattr(value, name)) for name in names})
    return value


def seen_at_top(status: Status) -> RenderableType:
    watched = StatusHistory()
    watched.take(replace(status, tasks=(), group=0), 0.0)
    news = watched.take(replace(status, group=1), 1.0)
    return top_view(watched, HOSTILE, news, Console(width=400))


VIEWS: dict[str, Callable[[Status], RenderableType]] = {
    "status": lambda status: status_view(JobView.of(status), HOSTILE),
    "why": lambda status: why_view(JobView.of(status), show_all=True),
    "top": seen_at_top,
}


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("view", VIEWS)
def test_hostile_texts_are_shown_escaped(training: Status, view: str, terminal: bool) -> None:
    drawn = VIEWS[view](hostile(training))
    written = text_of(drawn, width=5000)
    if terminal:
        console = Console(file=StringIO(), width=5000, force_terminal=True, color_system=None)
        with console.capture() as capture:
            console.print(drawn)
        written = capture.get()
    assert SHOWN in written
    assert "[bold red]b[/bold red][link=http://a.b]c[/link]" in written
    assert all(each.isprintable() for each in written.split("\n"))
    assert not [each for each in written.split("\n") if each.startswith("2026-")]


def test_hostile_texts_are_whole_in_json(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {GetStatus: [hostile(training)]}
    for command in ("status", "why"):
        assert main([command, "--json"]) == 0
        written = capsys.readouterr().out
        assert written.rstrip("\n").isprintable()
        assert HOSTILE in [each["reason"] for each in json.loads(written)["waits"]]


def test_hostile_reason_of_a_refusal_is_one_indented_text(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {GetStatus: [RefusedError(HOSTILE)]}
    assert main(["status"]) == RefusedError.exit_code
    error = capsys.readouterr().err
    assert error.startswith("error: x\n  2026-")
    assert all(each.isprintable() for each in error.split("\n"))


def test_hostile_answer_to_a_command_is_escaped(
    ps: Any, training: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.replies = {GetStatus: [hostile(training)], RequestStop: [Done(HOSTILE)]}
    main(["stop"])
    written = capsys.readouterr().out
    assert written and all(each.isprintable() for each in written.split("\n"))
    assert line(hostile(training)).isprintable()
