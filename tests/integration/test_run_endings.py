"""Ends of `zmqtrain run` that are not the job's."""

from __future__ import annotations

import signal
import sys
from typing import Any

import psutil
import pytest

from zmqtrain.errors import ExitCode

pytestmark = pytest.mark.integration


def started(stage: Any, *flags: str | int) -> tuple[Any, list[psutil.Process]]:
    """Start a run that does not end by itself; return it, and all processes below it."""
    run = stage.train(stage.job(gated=True, logdir=str(stage.logdir)), "--workers", 1, *flags)
    stage.until_status(
        stage.run_address(),
        lambda s: s.step > 0 and len([task for task in s.tasks if task.state != "joining"]) == 3,
        "steps of everyone",
    )
    return run, psutil.Process(run.pid).children(recursive=True)


def test_run_whose_terminal_is_closed_ends_in_order(stage: Any) -> None:
    run, _ = started(stage)
    run.signal(signal.SIGHUP)
    assert run.exit_code() == ExitCode.TERMINATED, str(run)
    assert run.json()["checkpoint"]


def test_tasks_of_a_run_that_is_killed_end_as_well(stage: Any) -> None:
    run, below = started(stage, "--grace-s", 2)
    run.signal(signal.SIGKILL)
    assert run.exit_code() == -signal.SIGKILL
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive
    clean = stage.start("clean", sys.executable, "-m", "zmqtrain", "clean")
    assert clean.exit_code() == ExitCode.OK, str(clean)
    assert not list(stage.segments.glob("*"))


def test_second_interrupt_ends_a_run_at_once(stage: Any) -> None:
    """At the first it waits for a worker that stands still."""
    run, below = started(stage, "--grace-s", 3000, "--join-timeout-s", 4000, "--lease-s", 2000)
    next(process for process in below if process.name() == "zmqtrain worker").suspend()
    run.signal(signal.SIGINT)
    stage.until_status(
        stage.run_address(),
        lambda s: any("finish their steps" in wait.reason for wait in s.waits),
        "a chief that waits for the workers",
    )
    run.signal(signal.SIGINT)
    assert run.exit_code() == ExitCode.INTERRUPTED, str(run)
    assert run.log.splitlines()[-1] == (
        "error: stopped at once: updates since the last checkpoint are lost"
    )


def test_second_interrupt_does_not_wait_for_an_evaluation(stage: Any) -> None:
    begun = stage.directory / "begun"
    run = stage.train(stage.job("unending_job", begun=str(begun)), "--workers", 1)
    stage.until(begun.exists, "the evaluation")

    def ends_when_asked_again() -> bool:
        run.signal(signal.SIGINT)
        return run.popen.poll() is not None

    stage.until(ends_when_asked_again, "the end")
    assert run.exit_code() == ExitCode.INTERRUPTED, str(run)
    assert run.log.splitlines()[-1].startswith("error: stopped at once")
