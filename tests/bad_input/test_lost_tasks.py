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


def test_run_starts_killed_tasks_again_and_goes_on_without_a_worker_that_is_told_to_leave(
    stage: Any,
) -> None:
    run = stage.train(stage.job(gated=True), "--heartbeat-s", 0.2, "--lease-s", 1)
    step = 0
    for role in ("ps", "worker"):
        least = step + 1
        status = stage.until_status(stage.run_address(), lambda s, n=least: s.step >= n, "steps")
        step = status.step
        started_by(run, role)[0].send_signal(signal.SIGKILL)
        run.until_line(f"{role} . was killed by signal 9 .*: restarting")
    stage.until_status(stage.run_address(), lambda s: s.step > step + 1, "steps after that")
    started_by(run, "worker")[0].terminate()
    run.until_line("training goes on; workers left: 1")
    stage.open_gate()
    assert run.summary()["global_step"] == 300


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
