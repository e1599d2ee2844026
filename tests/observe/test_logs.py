from __future__ import annotations

import logging
import re
from datetime import datetime

import pytest

from zmqtrain.observe.logs import (
    FORMATS,
    LINES_PER_SECOND,
    Formatter,
    LogLine,
    RateLimit,
    StateLogger,
    setup_logging,
)


def record_of(level: int, text: str, error: Exception | None = None) -> logging.LogRecord:
    exc_info = (type(error), error, None) if error is not None else None
    return logging.LogRecord("zmqtrain.ps", level, "", 0, text, (), exc_info)


@pytest.mark.parametrize("log_format", FORMATS)
def test_line_has_time_with_zone_level_and_task(log_format: str) -> None:
    record = record_of(logging.WARNING, "listening")
    written = Formatter("ps 0 100%", log_format).format(record)
    line = LogLine.parsed(written) if log_format == "json" else None
    if line is None:
        line = LogLine(*written.split(maxsplit=2)[:2], "ps 0 100%", "", "listening")
        assert str(line) == written
    then = datetime.fromisoformat(line.time)
    assert then.utcoffset() is not None
    assert then.timestamp() == pytest.approx(record.created, abs=0.001)
    assert (line.level, line.task, line.text) == ("WARNING", "ps 0 100%", "listening")


def test_json_line_holds_a_traceback_as_a_field_and_reads_back_as_text() -> None:
    record = record_of(logging.ERROR, "first\nsecond", ValueError("no"))
    written = Formatter("ps 0", "json").format(record)
    assert "\n" not in written
    line = LogLine.parsed(written)
    assert line is not None
    assert line.is_error
    assert line.text == "first\nsecond\nValueError: no"
    assert str(line) == Formatter("ps 0", "text").format(record)


@pytest.mark.parametrize("log_format", FORMATS)
def test_message_of_a_peer_forges_no_line_and_no_escape(log_format: str) -> None:
    forged = "x\n2026-11-25T12:00:00.000+00:00 INFO ps 0: all is well\x1b]0;t\x07\u202e\x9b"
    formatter = Formatter("ps 0", log_format)
    written = formatter.format(record_of(logging.INFO, forged))
    assert written.isprintable()
    shown = written if log_format == "text" else str(LogLine.parsed(written))
    assert r"x\n2026-11-25" in shown and shown.endswith(r"\x1b]0;t\x07\u202e\x9b")
    traced = formatter.format(record_of(logging.ERROR, "no", ValueError(forged)))
    _, *others = traced.split("\n")
    assert all(line.isprintable() and line.startswith("  ") for line in others)


@pytest.mark.parametrize("text", ["", "hello", "[" * 9999, "3", "[]", "{}", '{"loss": 3}', "null"])
def test_printed_text_is_no_line_of_a_log(text: str) -> None:
    assert LogLine.parsed(text) is None


def test_process_logs_to_stderr_once_however_often_it_is_set_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("worker 3", "info")
    setup_logging("worker 3", "info")
    logging.getLogger("zmqtrain.roles.worker").info("joined as incarnation %d", 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"\S+ INFO worker 3: joined as incarnation 2\n", captured.err)


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("debug", ["z-debug", "z-info", "z-warning", "lib-info", "lib-warning"]),
        ("INFO", ["z-info", "z-warning", "lib-info", "lib-warning"]),
        ("warning", ["z-warning", "lib-warning"]),
        ("error", []),
    ],
)
def test_level_holds_for_zmqtrain_and_libraries_log_from_info_on(
    level: str, heard: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("chief 0", level)
    for logger, name in ((logging.getLogger("zmqtrain.x"), "z"), (logging.getLogger("x"), "lib")):
        logger.debug(f"{name}-debug")  # noqa: G004
        logger.info(f"{name}-info")  # noqa: G004
        logger.warning(f"{name}-warning")  # noqa: G004
    assert [text.split()[-1] for text in capsys.readouterr().err.splitlines()] == heard


def test_state_is_logged_when_it_changes_and_not_before(caplog: pytest.LogCaptureFixture) -> None:
    states = StateLogger(logging.getLogger("zmqtrain.test"))
    with caplog.at_level(logging.INFO, "zmqtrain.test"):
        for text in ("waiting for worker 3", "waiting for worker 3", "training", "training"):
            states.state("step", text)
        states.state("checkpoint", "training")
        states.state("step", "waiting for worker 3", logging.WARNING)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "waiting for worker 3"),
        ("INFO", "training"),
        ("INFO", "training"),
        ("WARNING", "waiting for worker 3"),
    ]


def record_at(
    line_number: int, second: float, level: int = logging.INFO, what: str = "x"
) -> logging.LogRecord:
    record = logging.LogRecord("zmqtrain.ps", level, "ps.py", line_number, "no %s", (what,), None)
    record.created = second
    return record


def test_lines_of_one_place_are_limited_per_second() -> None:
    limit = RateLimit()
    numbers = range(2 * LINES_PER_SECOND)
    records = [record_at(7, 1.0 + number / 100, what=str(number)) for number in numbers]
    passed = [record.getMessage() for record in records if limit.filter(record)]
    last = f"no {LINES_PER_SECOND - 1} (further lines like this are dropped for a second)"
    assert passed == [f"no {number}" for number in numbers[: LINES_PER_SECOND - 1]] + [last]
    assert limit.filter(record_at(8, 1.5)), "another place in the code"
    assert limit.filter(record_at(7, 2.0)), "the next second"
    assert limit.filter(record_at(7, 1.5, logging.DEBUG)), "asked for"


def test_same_line_of_one_place_is_logged_once_a_second() -> None:
    limit = RateLimit()
    times = [1.9, 2.1, 2.8, 3.0, 3.5]
    assert [second for second in times if limit.filter(record_at(7, second))] == [1.9, 3.0]
    assert limit.filter(record_at(7, 3.6, what="y")), "another line"
    assert limit.filter(record_at(8, 3.6, what="x")), "another place"
