"""The log of a task on stderr: a line for each event, as text or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime

from zmqtrain.texts import printable, printable_lines

LINES_PER_SECOND = 20


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the log; ``exception`` is the traceback of an error."""

    time: str
    level: str
    task: str
    logger: str
    message: str
    exception: str = ""

    @classmethod
    def parsed(cls, line: str) -> LogLine | None:
        """Return the line that :meth:`json` wrote; None for anything else, such as a print()."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            return None

    @property
    def is_error(self) -> bool:
        return self.level in ("ERROR", "CRITICAL")

    @property
    def text(self) -> str:
        """The message, and below it the traceback if there is one."""
        return "\n".join(filter(None, (self.message, self.exception)))

    def __str__(self) -> str:
        """Return ``2026-11-22T12:30:01.250+01:00 INFO worker 3: message``.

        The message is one line, and the lines of a traceback are indented.
        """
        line = printable(f"{self.time} {self.level} {self.task}: {self.message}")
        return f"{line}\n  {printable_lines(self.exception)}" if self.exception else line

    def json(self) -> str:
        """Return an object with all fields; an exception only if there is one."""
        return json.dumps(
            {name: text for name, text in asdict(self).items() if text or name != "exception"}
        )


def line_as_text(line: str) -> str:
    """Return a line of a task's output; if it is a line of a log in JSON, the same as text."""
    return str(LogLine.parsed(line) or line)


def line_as_json(task: str, line: str) -> str:
    """Return a line of a task's output that is an object, or that is the message of an object."""
    try:
        if isinstance(json.loads(line), dict):
            return line
    except (ValueError, RecursionError):
        pass
    return json.dumps({"task": task, "message": line})


FORMATS: Mapping[str, Callable[[LogLine], str]] = {"text": str, "json": LogLine.json}


class Formatter(logging.Formatter):
    """Writes lines of a task in one of :data:`FORMATS`."""

    def __init__(self, task: str, log_format: str) -> None:
        super().__init__()
        self._task, self._written = task, FORMATS[log_format]

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone()
        return self._written(
            LogLine(
                time.isoformat(timespec="milliseconds"),
                record.levelname,
                self._task,
                record.name,
                record.getMessage(),
                self.formatException(record.exc_info) if record.exc_info else "",
            )
        )


def setup_logging(task: str, level: str, log_format: str = "text") -> None:
    """Send this process's log to stderr only; for the main function of a process.

    ``task`` is the name in each line, such as ``ps 0``; ``level`` is one of logging and applies
    to zmqtrain; ``log_format`` is one of :data:`FORMATS`. Libraries log at INFO and above: some
    log every step at DEBUG.
    """
    number: int = getattr(logging, level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter(task, log_format))
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("zmqtrain").setLevel(number)


class RateLimit(logging.Filter):
    """Limits the lines per second from each place in the code; zmqtrain repeats none in a second.

    Otherwise a peer that sends invalid messages could fill the disk with log lines, and tasks that
    share a process would log everything twice. DEBUG is not limited.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds: dict[tuple[str, int], tuple[int, int]] = {}  # place -> second, lines in it
        self._last: dict[tuple[str, int], tuple[str, float]] = {}  # place -> line, its time

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        place, now = (record.pathname, record.lineno), int(record.created)
        if record.name.startswith("zmqtrain."):  # a library's line may not fit its arguments
            text, at = self._last.get(place, ("", 0.0))
            if record.getMessage() == text and record.created - at < 1.0:
                return False
            self._last[place] = record.getMessage(), record.created
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
