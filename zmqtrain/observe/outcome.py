"""The outcome of a run: a small file that outlives its tasks.

The chief writes it into the logdir, and for the job's engine. A job that goes on has none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from zmqtrain.errors import RETRYABLE, ExitCode, ZmqTrainError
from zmqtrain.files import open_file, read_file, replace_file
from zmqtrain.hints import host_error
from zmqtrain.metrics import numbers
from zmqtrain.observe.summary import Summary, as_json

FILE = "ended.json"
STOPPED_BY = "stopped by "
"""How the reason of a job begins that was stopped; under an engine its exit code is 0."""

MOST_LETTERS = 1000  # of a reason: Kubernetes keeps 4096 bytes of such a file
MOST_MEASURES = 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run.

    ``ended``: the reason. ``exit_code``: the job's. ``at``: Unix time. ``step``: the last
    one; ``train_loss``, ``measures``: as in the summary, None and {} if they are not known.
    ``checkpoint``: the newest one, "" if there is none.
    """

    job: str
    ended: str
    exit_code: int
    at: Annotated[float, Field(ge=0, le=1e11)]  # a date of the calendar
    step: int | None = None
    train_loss: float | None = None
    measures: dict[str, float | None] = field(default_factory=dict)
    checkpoint: str = ""

    @classmethod
    def of(cls, summary: Summary) -> Outcome:
        return cls(
            job=summary.job,
            ended=summary.ended,
            exit_code=int(summary.exit_code),
            at=time.time(),
            step=summary.global_step,
            train_loss=summary.train_loss,
            measures=dict(list(numbers(summary.measures).items())[:MOST_MEASURES]),
            checkpoint=summary.checkpoint or "",
        )

    def text(self) -> str:
        """Return one line of JSON."""
        most = MOST_LETTERS if self.ended.isascii() else MOST_LETTERS // 5  # others are escaped
        return as_json(asdict(self) | {"ended": self.ended[:most]})


def outcome_in(text: str | bytes) -> Outcome | None:
    """Return the outcome that a file's text holds, None if it holds none."""
    try:
        return TypeAdapter(Outcome).validate_json(text)
    except ValidationError:
        return None


def read_outcome(path: Path) -> Outcome | None:
    """Return the outcome that a file holds, None if it holds none or cannot be read."""
    with contextlib.suppress(OSError):
        return outcome_in(read_file(path))
    return None


@contextlib.contextmanager
def recorded(
    job: str, logdir: str | None, file: str | None, summary: Callable[[], Summary | None]
) -> Iterator[None]:
    """Write how the run of the block ends: by its summary, or by an error without one.

    ``file``: another one beside that of the ``logdir``. ``summary`` returns that of the run, None
    if there is none. An error after which a restart may help replaces no outcome: a chief that is
    started again after the end of the job finds no other task.
    """
    outcome, is_final = None, True
    try:
        yield
    except Exception as error:
        text, code = _reason(error)
        outcome, is_final = Outcome(job, text, code, time.time()), code < RETRYABLE
        raise
    finally:
        if (found := summary()) is not None:
            outcome, is_final = Outcome.of(found), True
        if outcome is not None:
            _write(outcome, logdir, file, replaces=is_final)


def record_failure(trained: Summary, logdir: str | None, error: Exception) -> None:
    """Record that a script failed after its training, with the figures of the training."""
    text, code = _reason(error)
    _write(replace(Outcome.of(trained), ended=text, exit_code=code), logdir, None)


def _reason(error: Exception) -> tuple[str, int]:
    """Return the reason and the exit code of a run that an error ends."""
    mistake = error if isinstance(error, ZmqTrainError) else host_error(error)
    if mistake is not None:
        return str(mistake), int(mistake.exit_code)
    kind = "" if isinstance(error, OSError) else "a bug: "
    return f"{kind}{type(error).__name__}: {error}", int(ExitCode.CRASH)


def _write(outcome: Outcome, logdir: str | None, file: str | None, replaces: bool = True) -> None:
    content = outcome.text().encode()
    own = Path(logdir, FILE) if logdir else None
    for path, write in ((own, _write_own), (file, _write_in_place)):
        try:
            if path is not None and (replaces or read_outcome(Path(path)) is None):
                write(Path(path), content)
        except OSError as error:
            log.warning("zmqtrain status cannot show how the job ended: %s", error)


def forget(logdir: str | None, file: str | None = None) -> None:
    """Remove the outcome of the previous run, because another one begins."""
    for known in (logdir and Path(logdir, FILE), file):
        if known:
            with contextlib.suppress(OSError):
                os.truncate(known, 0)


def _write_own(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def _write_in_place(path: Path, content: bytes) -> None:
    """Write a file that may be mounted, as /dev/termination-log is."""
    with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as opened:
        opened.write(content)
