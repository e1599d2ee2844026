"""Ends of `zmqtrain run` that are not the job's."""

from __future__ import annotations

import signal
import sys
from typing import Any

import psutil
import pytest

from zmqtrain.errors import ExitCode
from zmqtrain.observe.outcome import FILE, outcome_in

pytestmark = pytest.mark.integration


def started(stage: Any, *flags: str | int, **fields: Any) -> tuple[Any, list[psutil.Process]]:
    """Start a run that does not end by itself; return it, and all processes below it."""
    fields = {"logdir": str(stage.logdir), **fields}
    run = stage.train(stage.job(gated=True, **fields), "--workers", 1, *flags)
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


@pytest.mark.parametrize("is_saved", [True, False])
def test_run_whose_ps_is_killed_too_often_saves_and_tells_how_to_go_on(
    stage: Any, is_saved: bool
) -> None:
    logdir = str(stage.logdir) if is_saved else None
    run, below = started(stage, "--max-restarts", 0, logdir=logdir)
    next(process for process in below if process.name() == "zmqtrain ps").kill()
    assert run.exit_code() == ExitCode.PEER_LOST, str(run)
    said = run.json()["ended"]
    assert said.startswith("ps 0 was killed by signal 9 (SIGKILL) after ")
    assert "its limit of 0 restarts within 600 s (" in said
    if not is_saved:
        assert "; nothing was saved, because the job has no logdir; " in said
        return
    (checkpoint,) = (stage.logdir / "checkpoints").glob("step-*")
    assert said.endswith(f"; run the same command to resume from step {int(checkpoint.name[5:])}")
    outcome = outcome_in((stage.logdir / FILE).read_text())
    assert outcome is not None
    assert (outcome.exit_code, outcome.checkpoint) == (ExitCode.PEER_LOST, str(checkpoint))
    assert outcome.ended in said


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
