"""How the chief's process tells of progress: a line now and then."""

from __future__ import annotations

import logging
import time

from zmqtrain.config.cluster import Role
from zmqtrain.wire.messages import Status

INTERVAL_S = 2.0

log = logging.getLogger(__name__)


class ProgressLog:
    """Logs the status every ``INTERVAL_S``, and whenever the set of live tasks changes."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._tasks: tuple[str, ...] = ()

    def __call__(self, status: Status) -> None:
        tasks = tuple(task.task for task in status.tasks if task.state != "left")
        now = time.monotonic()
        if now < self._next_at and tasks == self._tasks:
            return
        self._next_at, self._tasks = now + INTERVAL_S, tasks
        log.info("%s", line(status))


def line(status: Status) -> str:
    """Return the status in one line."""
    workers = "  ".join(
        f"w{task.index}: {task.step} {task.state}"
        for task in status.tasks
        if task.role == Role.WORKER
    )
    return (
        f"step {status.step}/{status.steps}  {status.steps_per_second:.0f} steps/s  "
        f"loss {shown_loss(status)}  staleness {status.staleness['mean']:.2f}  {workers}"
    )


def shown_loss(status: Status) -> str:
    """Return the loss of the last push, as long as there is one."""
    return f"{status.loss:.4f}" if any(status.pushes.values()) else "-"
