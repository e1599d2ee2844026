"""The border to code that the user wrote."""

from __future__ import annotations

import json
import logging
import re
from bdb import BdbQuit
from typing import Any

import pytest

from zmqtrain.errors import ConfigError, DataError
from zmqtrain.user_code import described, place_of, user_code

HERE = rf"{re.escape(__file__)}, line \d+"


def fail(error: Exception) -> None:
    raise error


def caught(call: Any) -> Exception:
    with pytest.raises(Exception) as raised:
        call()
    return raised.value


def test_error_is_told_with_its_owner_and_the_line() -> None:
    text = rf"^load\(\) of \['owner'\] failed: {HERE}: KeyError: 3$"
    with pytest.raises(DataError, match=text), user_code("load()", ["owner"], DataError):
        fail(KeyError(3))


def test_debugger_that_found_no_terminal_says_where_to_debug() -> None:
    text = rf"^{HERE}: the debugger was left; a task .* run JOB --debug 0, or .*\.run\(job\)"
    with pytest.raises(ConfigError, match=text), user_code("load()", "data"):
        fail(BdbQuit())


def test_details_are_asked_for_only_when_something_failed() -> None:
    asked: list[str] = []

    def details() -> str:
        asked.append("details")
        return "It was batch 3"

    with user_code("take()", "data", details=details):
        pass
    assert asked == []
    with (
        pytest.raises(ConfigError, match=r"ValueError: no\. It was batch 3$"),
        user_code("take()", "data", details=details),
    ):
        fail(ValueError("no"))


def test_traceback_is_kept_for_those_who_ask(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="zmqtrain")
    with pytest.raises(ConfigError) as raised, user_code("load()", "data"):
        fail(ValueError("no"))
    assert isinstance(raised.value.__cause__, ValueError)
    assert any(record.exc_info for record in caplog.records)


def test_place_is_the_users_line_and_not_that_of_the_library_it_calls() -> None:
    error = caught(lambda: json.loads("{"))
    assert re.fullmatch(HERE, place_of(error))
    assert re.fullmatch(rf"{HERE}: JSONDecodeError: Expecting .*", described(error))


def test_error_without_a_line_of_the_user_has_no_place() -> None:
    assert place_of(ValueError("never raised")) == ""
    assert described(ValueError("never raised")) == "ValueError: never raised"
    assert described(ValueError()) == "ValueError"


def test_syntax_error_is_placed_where_the_syntax_is_wrong() -> None:
    error = caught(lambda: compile("x = 1\ny = = 2", "job.py", "exec"))
    assert described(error) == "job.py, line 2: invalid syntax"
