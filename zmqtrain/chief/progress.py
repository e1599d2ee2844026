"""How the chief reports progress: lines in the log, less and less often."""

from __future__ import annotations

import logging
import time
from collections import Counter

from zmqtrain.config.cluster import Role
from zmqtrain.wire.messages import Status

FIRST_INTERVAL_S = 2.0
LONGEST_INTERVAL_S = 60.0

log = logging.getLogger(__name__)


class ProgressLog:
    """Logs the status at once, then after 2 s, 4 s and so on up to 60 s.

    Also whenever the set of live tasks changes.
    """

    def __init__(self) -> None:
        self._next_at = 0.0
        self._interval_s = FIRST_INTERVAL_S
        self._tasks: tuple[str, ...] = ()

    def __call__(self, status: Status) -> None:
        tasks = tuple(task.task for task in status.tasks if task.state != "left")
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + self._interval_s
            self._interval_s = min(2 * self._interval_s, LONGEST_INTERVAL_S)
        elif tasks == self._tasks:
            return
        self._tasks = tasks
        log.info("%s", line(status))


def line(status: Status) -> str:
    """Return the status in one line."""
    states = Counter(task.state for task in status.tasks if task.role == Role.WORKER)
    workers = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
    end = f"/{status.steps}" if status.steps else ""
    return (
        f"step {status.step}{end}  {status.steps_per_second:.0f} steps/s  "
        f"loss {shown_loss(status)}  staleness {status.staleness['mean']:.2f}  workers: {workers}"
    )


def shown_loss(status: Status) -> str:
    """Return the loss of the last push, "-" before the first one."""
    return f"{status.loss:.4f}" if any(status.pushes.values()) else "-"
