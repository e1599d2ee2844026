"""The log of a task on stderr: a line for each event, as text or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import datetime

LINES_PER_SECOND = 20


class TextFormatter(logging.Formatter):
    """``2026-11-22T12:30:01.250+01:00 INFO worker 3: message``."""

    def __init__(self, task: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {task.replace('%', '%%')}: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time_of(record)


class JsonFormatter(logging.Formatter):
    """An object with time, level, task, logger, message and, of an error, its traceback."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self._task = task

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time_of(record),
            "level": record.levelname,
            "task": self._task,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


FORMATS = {"text": TextFormatter, "json": JsonFormatter}


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that `JsonFormatter` wrote."""

    time: str
    level: str
    task: str
    logger: str
    message: str
    exception: str = ""

    @classmethod
    def parsed(cls, line: str) -> LogLine | None:
        """Return the parsed line; None if it is something else, such as output of a print()."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None

    @property
    def is_error(self) -> bool:
        return self.level in ("ERROR", "CRITICAL")

    @property
    def text(self) -> str:
        """The message, and below it the traceback if there is one."""
        return "\n".join(filter(None, (self.message, self.exception)))

    def __str__(self) -> str:
        """Return the line in the form of `TextFormatter`."""
        return f"{self.time} {self.level} {self.task}: {self.text}"


def setup_logging(task: str, level: str, log_format: str = "text") -> None:
    """Send this process's log to stderr only; for the main function of a process.

    ``task`` is the name in each line, such as ``ps 0``; ``level`` is one of logging and applies
    to zmqtrain; ``log_format`` is one of `FORMATS`. Libraries log at INFO and above: some log every
    step at DEBUG.
    """
    number: int = getattr(logging, level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATS[log_format](task))
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("zmqtrain").setLevel(number)


class RateLimit(logging.Filter):
    """Limits the lines per second from each place in the code.

    Otherwise a peer that sends invalid messages could fill the disk with log lines. DEBUG is not
    limited.
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
            record.msg = f"{record.getMessage()} (further lines like this are dropped for a second)"
            record.args = ()
        return lines <= LINES_PER_SECOND


class StateLogger:
    """Logs a state only when it changes."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._texts: dict[Hashable, str] = {}

    def state(self, key: Hashable, text: str, level: int = logging.INFO) -> None:
        """Log ``text`` unless it is the last one logged for ``key``."""
        if self._texts.get(key) != text:
            self._texts[key] = text
            self._log.log(level, "%s", text, stacklevel=2)


def _time_of(record: logging.LogRecord) -> str:
    """Return local time with its offset from UTC, to the millisecond (ISO 8601)."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
