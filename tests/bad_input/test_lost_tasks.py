"""A task that dies without a word: whoever cannot go on ends in time, and says who is missing."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.integration


def started_by(run: Any, role: str) -> list[psutil.Process]:
    """Return the tasks of this role that a ``zmqtrain run`` has started."""
    below = psutil.Process(run.pid).children(recursive=True)
    return [task for task in below if task.name() == f"zmqtrain {role}"]


def test_run_that_ends_leaves_no_segment_of_a_killed_ps(stage: Any) -> None:
    run = stage.train(stage.job(gated=True), "--workers", 1)
    stage.until_status(stage.run_address(), lambda status: status.step > 0, "steps")
    run.signal(signal.SIGSTOP)  # so that it starts nobody again meanwhile
    for task in started_by(run, "ps") + started_by(run, "worker"):
        task.kill()
    run.signal(signal.SIGINT)
    run.signal(signal.SIGCONT)
    run.exit_code()
    assert not list(stage.segments.glob("*"))
