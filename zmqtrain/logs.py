"""What a task writes to stderr: one line an event, each with the task's name."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from zmqtrain.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")


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
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("zmqtrain").setLevel(number)


class StateLogger:
    """Logs a state when it changes, not each time that it is looked at."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._texts: dict[Hashable, str] = {}

    def state(self, key: Hashable, text: str, level: int = logging.INFO) -> None:
        """Log ``text`` unless it is what ``key`` was last said to be."""
        if self._texts.get(key) != text:
            self._texts[key] = text
            self._log.log(level, "%s", text)
