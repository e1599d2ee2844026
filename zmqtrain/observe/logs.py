"""What a task writes to stderr: one line an event, each with the task's name."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from zmqtrain.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
LINES_PER_SECOND = 20


class LineFormatter(logging.Formatter):
    """``12:30:01.250 W[3] message``, with the level before the message when it is not INFO."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self, task_prefix: str) -> None:
        super().__init__(f"%(asctime)s {task_prefix.replace('%', '%%')} %(level)s%(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        return super().formatMessage(record)


def setup_logging(task_prefix: str, level: str) -> None:
    """Send this process's log to stderr, and nowhere else; for the main function of a process.

    ``task_prefix`` names the task, such as ``S[0]``; ``level`` is one of `LEVELS` and holds for
    zmqtrain. Libraries are never heard below INFO: some report every step at DEBUG.

    Raises:
        ConfigError: there is no such level.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(
            f"unknown log level {level!r}; expected one of {', '.join(LEVELS)}; "
            "correct --log-level (ZMQTRAIN_LOG_LEVEL)"
        )
    number: int = getattr(logging, level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(task_prefix))
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("zmqtrain").setLevel(number)


class RateLimit(logging.Filter):
    """Lets only so many lines a second through from each place in the code.

    Whoever sends nonsense as fast as the wire allows does not fill the disk with what is said of
    it. DEBUG is not limited: it was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds: dict[tuple[str, int], tuple[int, int]] = {}  # place -> second, lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        place, now = (record.pathname, record.lineno), int(record.created)
        second, lines = self._seconds.get(place, (now, 0))
        lines = lines + 1 if second == now else 1
        self._seconds[place] = now, lines
        if lines == LINES_PER_SECOND:
            record.msg = f"{record.getMessage()} (more like this are left out for a second)"
            record.args = ()
        return lines <= LINES_PER_SECOND


class StateLogger:
    """Logs a state when it changes, not each time that it is looked at."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._texts: dict[Hashable, str] = {}

    def state(self, key: Hashable, text: str, level: int = logging.INFO) -> None:
        """Log ``text`` unless it is what ``key`` was last said to be."""
        if self._texts.get(key) != text:
            self._texts[key] = text
            self._log.log(level, "%s", text, stacklevel=2)
