"""Processes that are started again when they crash, as `zmqtrain supervise` and honcho do it."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import Process, Stage, check_counts
from zmqtrain.config import run_file
from zmqtrain.errors import ExitCode
from zmqtrain.protocol.status import Status

PROCFILE = Path(__file__).parents[2] / "Procfile"
STEPS = 2000  # more than are done before the gate is opened
DEADLINE_S = 40.0  # reached only when something is broken

CRASHES_TWICE = "echo >> lives; test $(wc -l < lives) -gt 2 || kill -9 $$"
MINDS_SIGTERM = """
import os, signal, sys

signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
open("pid.new", "w").write(str(os.getpid()))
os.rename("pid.new", "pid")
while True:
    signal.pause()
"""


def supervise(stage: Stage, *arguments: str) -> Process:
    return stage.start("supervise", sys.executable, "-m", "zmqtrain", "supervise", *arguments)


def until_pid(stage: Stage) -> int:
    path = stage.directory / "pid"
    stage.until(path.exists, "the process's pid")
    return int(path.read_text())


def test_crashed_process_is_started_again_until_it_is_done(stage: Stage) -> None:
    supervised = supervise(stage, "--", "sh", "-c", CRASHES_TWICE)
    assert supervised.exit_code() == 0, str(supervised)
    assert (stage.directory / "lives").read_text() == "\n" * 3
    assert [line.split()[1] for line in supervised.log.splitlines()] == ["WARNING"] * 2


def test_sigterm_is_passed_on_and_the_process_is_not_started_again(stage: Stage) -> None:
    supervised = supervise(stage, "--", sys.executable, "-c", MINDS_SIGTERM)
    until_pid(stage)
    supervised.signal(signal.SIGTERM)
    assert supervised.exit_code() == 7, str(supervised)
    assert supervised.log == ""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent death signal")
def test_process_dies_with_its_supervisor(stage: Stage) -> None:
    supervised = supervise(stage, "--", sys.executable, "-c", MINDS_SIGTERM)
    end = os.pidfd_open(until_pid(stage))
    supervised.signal(signal.SIGKILL)
    assert select.select([end], [], [], DEADLINE_S)[0], "it lives on"
    os.close(end)


def pid_of(status: Status, task: str) -> int:
    (process,) = (each.process for each in status.tasks if each.task == task)
    return int(process.rpartition(":")[2])


@pytest.mark.parametrize("policy", ["hogwild", "local-steps:3,async"])
def test_job_of_honcho_ends_well_although_every_task_is_killed_once(
    stage: Stage, policy: str
) -> None:
    job = stage.job(
        "counting_job", gated=True, steps=STEPS, policy=policy, logdir=str(stage.logdir),
        save_secs=1,
    )  # fmt: skip
    (stage.directory / "Procfile").write_text(PROCFILE.read_text())
    port, _ = stage.free_ports(2)
    env = {
        "ZMQTRAIN_JOB": job,
        "ZMQTRAIN_BASE_PORT": str(port),
        "ZMQTRAIN_METRICS_PORT": "0",
        "ZMQTRAIN_HEARTBEAT_S": "0.2",
        "ZMQTRAIN_LEASE_S": "1",
    }
    honcho = stage.start("honcho", "honcho", "start", "-c", "ps=1,worker=1", env=env)
    leader = f"127.0.0.1:{port}"

    def until(condition: Callable[[Status], object], what: str) -> Status:
        return stage.until_status(leader, condition, what)

    stage.until(lambda: list(stage.logdir.glob("checkpoints/step-*/manifest.json")), "a checkpoint")
    killed: dict[str, int] = {}
    for task in ("worker 0", "chief 0", "ps 0"):
        status = until(lambda s: len(s.tasks) == 3, "everyone")
        killed[task] = pid_of(status, task)
        os.kill(killed[task], signal.SIGKILL)
        status = until(
            lambda s, task=task: len(s.tasks) == 3 and pid_of(s, task) != killed[task],
            f"the next life of {task}",
        )
        until(lambda s, step=status.step: s.step > step, f"steps after the death of {task}")
    stage.open_gate()

    assert honcho.exit_code() == 0, str(honcho)
    assert f"policy {policy}, 1 ps, 1 worker" in honcho.output
    assert f"global step {STEPS}," in honcho.output
    assert honcho.output.count("was killed by signal 9 (SIGKILL) after ") == 3
    assert "9 of 10 restarts within 600 s are left" in honcho.output
    assert len(check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}")) == STEPS


def test_worker_that_comes_back_after_the_end_of_its_job_leaves_with_it(stage: Stage) -> None:
    """Its first life crashes when the job has ended, and nobody is there for the second."""
    cluster = stage.cluster(stage.job(steps=20), workers=2)
    worker = " ".join(cluster.command("worker", 1))
    first = "touch lived; while ! test -e over; do sleep 0.05; done; kill -9 $$"
    late = supervise(stage, "sh", "-c", f"test -e lived || {{ {first}; }}; exec {worker}")
    stage.until((stage.directory / "lived").exists, "the first life")
    tasks = [cluster.start(role) for role in ("ps", "chief", "worker")]
    assert [task.exit_code() for task in tasks] == [0, 0, 0], stage.report
    (stage.directory / "over").touch()
    assert late.exit_code() == 0, str(late)


def test_worker_of_an_engine_leaves_a_job_that_has_its_last_checkpoint(stage: Stage) -> None:
    job = stage.job(logdir=str(stage.logdir), steps=20)
    run = stage.start("run", sys.executable, "-m", "zmqtrain", "run", job, "--workers", "1")
    assert run.exit_code() == 0, str(run)
    worker = stage.cluster(job).start("worker", 0, "--on-term", "leave")
    assert worker.exit_code() == 0, str(worker)
    assert worker.lines("the job has ended meanwhile"), str(worker)


@pytest.fixture
def note_end(stage: Stage, move_tempdir: Callable[[str], None]) -> Callable[[str], None]:
    """Notes the end of a job as its other tasks would."""
    move_tempdir(stage.environment()["TMPDIR"])
    return lambda address: run_file.note_end((address,), ExitCode.DIVERGED)


SHORT = ("--join-timeout-s", "6", "--grace-s", "1")


@pytest.mark.parametrize(("role", "ending"), [("worker", "killed"), ("ps", "stopped")])
def test_task_that_nobody_supervises_leaves_with_its_job_if_a_life_was_killed(
    stage: Stage, role: str, ending: str, note_end: Callable[[str], None]
) -> None:
    cluster = stage.cluster(stage.job())
    first = cluster.start(role, 0, *SHORT)
    first.until_line("listening at" if role == "ps" else "metrics at")
    first.signal(signal.SIGKILL if ending == "killed" else signal.SIGTERM)
    first.exit_code()
    note_end(cluster.leader)
    again = cluster.start(role, 0, *SHORT)
    expected = ExitCode.PEER_LOST if ending == "stopped" else ExitCode.DIVERGED
    assert again.exit_code() == expected, again
    assert bool(again.lines("the job has ended meanwhile")) == (ending != "stopped")


def test_next_job_at_the_same_addresses_is_no_end_to_a_task_that_was_killed(
    stage: Stage, note_end: Callable[[str], None]
) -> None:
    cluster = stage.cluster(stage.job(steps=20))
    killed = cluster.start("worker")
    killed.until_line("metrics at")
    killed.signal(signal.SIGKILL)
    killed.exit_code()
    note_end(cluster.leader)
    # It comes first, and finds that a job has ended since it was killed.
    late = cluster.start("worker")
    late.until_line("metrics at")
    tasks = [cluster.start("ps"), cluster.start("chief")]
    assert [task.exit_code() for task in (late, *tasks)] == [0] * 3, stage.report
    assert not late.lines("the job has ended meanwhile"), late
