"""The record of a run: figures by time, evaluations and news, for the page that shows it.

The chief notes them from the statuses that it sees. They are bounded: when there are too many
samples, every second one is dropped, and from then on samples are taken half as often. A job with a
logdir keeps its record there, and the next life goes on with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from zmqtrain.chief.job_view import JobView, spent_s
from zmqtrain.chief.status_history import StatusHistory
from zmqtrain.compute.offload import in_daemon
from zmqtrain.config.cluster import Role
from zmqtrain.files import read_file, replace_file
from zmqtrain.metrics import numbers
from zmqtrain.observe.metrics import Phases
from zmqtrain.observe.summary import as_json
from zmqtrain.protocol.status import Status

RECORD_FILE = "run.json"
SAMPLE_S = 1.0
MOST_SAMPLES = 1000
MOST_EVENTS = 500
SAVE_S = 30.0
MOST_BYTES = 4 << 20
"""A record is smaller; a file of another size is not read."""

FIGURES = ("at", "step", "speed", "loss", "staleness", "workers")
"""Columns of the samples, beside the seconds that workers spent in each phase of a step."""

log = logging.getLogger(__name__)

Evaluations = Callable[[], Sequence[Mapping[str, Any]]]


class Earlier(BaseModel):
    """The part of a record that the next life takes over."""

    columns: list[str]
    samples: list[list[float | None]]
    events: list[tuple[float, str]]
    evaluations: list[dict[str, float | None]]
    restarts: dict[str, int] = {}
    saved: int = 0


class RunRecord:
    """Notes statuses; times are Unix times in seconds."""

    def __init__(
        self,
        name: str,
        evaluations: Evaluations,
        logdir: str | None = None,
        clock: Callable[[], float] = lambda: time.time(),
    ) -> None:
        """``evaluations`` returns all so far, each with its ``step`` and its measures."""
        self._name, self._evaluations, self._clock = name, evaluations, clock
        self._logdir = None if logdir is None else Path(logdir)
        self._samples: list[list[Any]] = []
        self._events: deque[tuple[float, str]] = deque(maxlen=MOST_EVENTS)
        self._evaluated: list[dict[str, Any]] = []
        self._seen = 0  # of the evaluations of this life
        self._watched = StatusHistory()
        self._sampled: Status | None = None
        self._interval_s, self._began_at = SAMPLE_S, clock()
        self._saved_at = self._began_at
        self._resuming: asyncio.Task[None] | None = None  # reads that of an earlier life

    def take(self, status: Status, *, saved: int = 0, ended: str = "") -> None:
        """Record the news since the last status, and its figures if the last ones are old.

        ``saved``: the step of the chief's last checkpoint, which it may not have reported yet.
        ``ended``: why the job has ended, if this is its last status.
        """
        now = self._clock()
        self._note(self._watched.take(status, now, saved))
        if ended:
            self._note([f"the job has ended: {ended}"])
        evaluations = self._evaluations()
        self._evaluated += ({"at": now} | numbers(each) for each in evaluations[self._seen :])
        self._seen = len(evaluations)
        if len(self._evaluated) > MOST_SAMPLES:
            self._evaluated = self._evaluated[::2]
        if ended or not self._samples or now - self._samples[-1][0] >= self._interval_s:
            self._sample(status, now)

    def miss(self) -> None:
        """Note that ps 0 does not answer."""
        self._note(self._watched.take(None, self._clock()))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, with the tasks and waits of the last status."""
        record: dict[str, Any] = {
            "name": self._name,
            "now": self._clock(),
            "columns": [*FIGURES, *Phases.names()],
            "samples": list(self._samples),
            "events": list(self._events),
            "evaluations": list(self._evaluated),
            "restarts": dict(self._watched.restarts),
            "saved": self._watched.saved,
        }
        if self._sampled is not None:
            record |= described(self._watched.view)
        return record

    async def save_if_due(self) -> None:
        """Save the record now and then; go on with that of an earlier life once it is read."""
        if self._logdir is not None:
            self._resume_earlier(self._logdir)
        if self._clock() - self._saved_at >= SAVE_S:
            await self.save()

    async def save(self) -> None:
        """Write the record into the logdir, if there is one; a failure is logged."""
        self._saved_at = self._clock()
        if self._logdir is None:
            return
        await asyncio.shield(self._resume_earlier(self._logdir))  # leave() may wait for it, too
        try:
            await asyncio.to_thread(_write, self.as_dict(), self._logdir / RECORD_FILE)
        except OSError as error:
            log.warning("the record of the run cannot be written: %s", error)

    async def leave(self) -> None:
        """Note that this chief leaves the job, and save the record for the next one."""
        if self._sampled is not None:
            self._note(["the chief was stopped and left; the job goes on"])
            await self.save()

    def _resume_earlier(self, logdir: Path) -> asyncio.Task[None]:
        """Go on with the record of an earlier life, which is read once, while the job goes on."""
        if self._resuming is None:
            self._resuming = asyncio.create_task(self._read_earlier(logdir))
        return self._resuming

    async def _read_earlier(self, logdir: Path) -> None:
        if (found := await in_daemon(read_record, logdir)) is not None:
            self.resume(found)

    def resume(self, record: Mapping[str, Any]) -> None:
        """Go on with the record of an earlier life."""
        columns = [*FIGURES, *Phases.names()]
        if record["columns"] == columns and {*map(len, record["samples"])} <= {len(columns)}:
            self._samples = [*record["samples"], *self._samples]
        took_over = self._sampled is not None and self._sampled.seconds > 0
        text = "a new chief took over" if took_over else "the job is resumed"
        events = [*record["events"], (self._began_at, text), *self._events]
        self._events = deque(events, maxlen=MOST_EVENTS)
        self._watched.resume(record["restarts"], record["saved"])
        self._evaluated = [*record["evaluations"], *self._evaluated]

    def _note(self, texts: Sequence[str]) -> None:
        self._events += ((self._clock(), text) for text in texts)

    def _sample(self, status: Status, now: float) -> None:
        before, self._sampled = self._sampled, status
        speed = None
        if before is not None and self._samples:
            elapsed_s = max(now - self._samples[-1][0], 1e-3)
            speed = max(0.0, (status.step - before.step) / elapsed_s)
        known = {task.task: task for task in before.tasks} if before is not None else {}
        workers = [task for task in status.tasks if task.role == Role.WORKER]
        spent = [spent_s(task, known.get(task.task)) for task in workers if task.phases_s]
        phases = [sum(each) for each in zip(*spent, strict=True)] or [0.0] * len(Phases.names())
        live = sum(task.state != "left" for task in workers)
        loss, staleness = status.loss, status.staleness["mean"]
        self._samples.append([now, status.step, speed, loss, staleness, live, *phases])
        if len(self._samples) > MOST_SAMPLES:
            self._samples = self._samples[::2]
            self._interval_s *= 2


def read_record(logdir: Path) -> dict[str, Any] | None:
    """Return the record that a run has left in its logdir; None if none can be read."""
    path = logdir / RECORD_FILE
    if not path.exists():
        return None
    try:
        content = read_file(path, MOST_BYTES)
        return {**json.loads(content), **Earlier.model_validate_json(content).model_dump()}
    except (OSError, ValueError) as error:  # one of pydantic's is a ValueError
        log.warning("%s cannot be read: %s", path, error)
        return None


def _write(record: dict[str, Any], path: Path) -> None:
    replace_file(path, as_json(record).encode())


def described(view: JobView) -> dict[str, Any]:
    """Return how a job stands, as plain data for people."""
    status = view.status
    return {
        "state": view.state,
        "figures": view.headline(),
        "step": status.step,
        "steps": status.steps,
        "ended": bool(status.stop or status.failure),
        "tasks": [
            {"name": row.task.task, "state": row.task.state, "behind": row.task.behind}
            | {"silent_s": row.task.silent_s, "restarts": row.task.restarts}
            | {"speed": row.texts["steps/s"], "phases": list(row.spent_s)}
            for row in view.tasks()
        ],
        "waits": [
            {"owner": wait.owner, "peer": wait.peer, "since_s": wait.since_s}
            | {"until_s": wait.until_s, "reason": wait.reason}
            for wait in view.waits()
        ],
        "tables": {
            name: {"trained": table.trained, "nbytes": table.nbytes}
            for name, table in status.tables.items()
        },
    }
