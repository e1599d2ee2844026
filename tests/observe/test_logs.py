from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.observe.logs import (
    LINES_PER_SECOND,
    LineFormatter,
    RateLimit,
    StateLogger,
    setup_logging,
)


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Give the process its logging back, whatever the test does to it."""
    root, package = logging.getLogger(), logging.getLogger("zmqtrain")
    before = list(root.handlers), root.level, package.level
    yield
    root.handlers[:], root.level, package.level = before
    root.manager._clear_cache()  # type: ignore[attr-defined]


def line(level: int, text: str, prefix: str = "S[0]") -> str:
    record = logging.LogRecord("zmqtrain.ps", level, "", 0, text, (), None)
    return LineFormatter(prefix).format(record)


@pytest.mark.parametrize(
    ("level", "text"),
    [
        (logging.INFO, "S[0] listening"),
        (logging.WARNING, "S[0] WARNING listening"),
        (logging.ERROR, "S[0] ERROR listening"),
        (logging.DEBUG, "S[0] DEBUG listening"),
    ],
)
def test_line_has_time_prefix_and_any_level_but_info(level: int, text: str) -> None:
    written = line(level, "listening")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d\d\d " + re.escape(text), written)


def test_percent_sign_in_a_prefix_is_kept() -> None:
    assert " 100% ready" in line(logging.INFO, "ready", prefix="100%")


@pytest.mark.usefixtures("restored_logging")
def test_process_logs_to_stderr_once_however_often_it_is_set_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("W[3]", "info")
    setup_logging("W[3]", "info")
    logging.getLogger("zmqtrain.roles.worker").info("joined as incarnation %d", 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"\S+ W\[3\] joined as incarnation 2\n", captured.err)


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("debug", ["z-debug", "z-info", "z-warning", "lib-info", "lib-warning"]),
        ("INFO", ["z-info", "z-warning", "lib-info", "lib-warning"]),
        ("warning", ["z-warning", "lib-warning"]),
        ("error", []),
    ],
)
def test_level_holds_for_zmqtrain_and_libraries_are_never_heard_below_info(
    level: str, heard: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("C", level)
    for logger, name in ((logging.getLogger("zmqtrain.x"), "z"), (logging.getLogger("x"), "lib")):
        logger.debug(f"{name}-debug")  # noqa: G004
        logger.info(f"{name}-info")  # noqa: G004
        logger.warning(f"{name}-warning")  # noqa: G004
    assert [text.split()[-1] for text in capsys.readouterr().err.splitlines()] == heard


@pytest.mark.usefixtures("restored_logging")
def test_unknown_level_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as caught:
        setup_logging("C", "verbose")
    assert str(caught.value) == (
        "unknown log level 'verbose'; expected one of debug, info, warning, error; "
        "correct --log-level (ZMQTRAIN_LOG_LEVEL)"
    )


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


def record_at(line_number: int, second: float, level: int = logging.INFO) -> logging.LogRecord:
    record = logging.LogRecord("zmqtrain.ps", level, "ps.py", line_number, "no %s", ("x",), None)
    record.created = second
    return record


def test_one_place_logs_only_so_many_lines_a_second_and_says_so() -> None:
    limit = RateLimit()
    records = [record_at(7, 1.0 + number / 100) for number in range(2 * LINES_PER_SECOND)]
    passed = [record.getMessage() for record in records if limit.filter(record)]
    assert passed == ["no x"] * (LINES_PER_SECOND - 1) + [
        "no x (more like this are left out for a second)"
    ]
    assert limit.filter(record_at(8, 1.5)), "another place in the code"
    assert limit.filter(record_at(7, 2.0)), "the next second"
    assert limit.filter(record_at(7, 1.5, logging.DEBUG)), "asked for"


@pytest.mark.usefixtures("restored_logging")
def test_log_of_a_process_is_limited(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("W[3]", "info")
    for _ in range(10 * LINES_PER_SECOND):
        logging.getLogger("zmqtrain.roles.worker").info("again")
    assert len(capsys.readouterr().err.splitlines()) < 5 * LINES_PER_SECOND
