"""Tensors between processes: they travel on the agreed lane, whole, and leave nothing behind."""

from __future__ import annotations

import signal
from pathlib import Path

from threadpoolctl import threadpool_limits

import zmqtrain
from tests.harness import Process, Stage
from zmqtrain.config.job_file import load_job
from zmqtrain.errors import ExitCode
from zmqtrain.protocol.status import Status, TaskStatus
from zmqtrain.store.checkpoint import read_parameters
from zmqtrain.store.manifest import read_manifest

STEPS = 20
PS = 2
LONG = 1000  # steps that take longer than what is done meanwhile, until the gate is open


def workers(status: Status) -> list[TaskStatus]:
    return [task for task in status.tasks if task.task.startswith("worker")]


def steps_of(process: Process, status: Status) -> int:
    """Return how many steps the life of a worker in this process has done, 0 if it is over."""
    mine = [w for w in workers(status) if w.process.endswith(f":{process.pid}")]
    return sum(worker.step for worker in mine if worker.state != "left")


def left_in(stage: Stage) -> list[Path]:
    """Return the segments that are left in the stage's directory for them."""
    return sorted(stage.segments.glob("*"))


def long_job(stage: Stage) -> str:
    """Write a hogwild job of which every update adds 1 to every element of its parameters."""
    return stage.job(
        "level_job",
        gated=True,
        consistent_reads=True,
        size=50_000,
        steps=LONG,
        logdir=str(stage.logdir),
    )


def levels(logdir: Path) -> set[float]:
    """Return the different values that the parameters of a long job have in its last checkpoint."""
    checkpoint = logdir / f"checkpoints/step-{LONG:08d}"
    return set(read_parameters(checkpoint, read_manifest(checkpoint))["level"].tolist())


def test_every_lane_gives_the_same_parameters_and_no_read_is_torn(stage: Stage) -> None:
    job = stage.job("level_job", gated=True, policy="sync-replicas", steps=STEPS)
    digests = set()
    for flags, lane in ((), "shm"), (("--lane", "tcp", "--overlap"), "tcp"):
        stage.gate.unlink(missing_ok=True)
        # Without a directory of its own, so that once it is the one that everybody gets.
        run = stage.train(job, "--ps", PS, *flags, env={"ZMQTRAIN_SEGMENT_DIR": ""})
        status = stage.until_status(
            stage.run_address(),
            lambda s: sum(w.step > 0 for w in workers(s)) == 2,
            "the first step",
        )
        stage.open_gate()
        assert {worker.lanes for worker in workers(status)} == {",".join([lane] * PS)}
        assert {task.lanes for task in status.tasks if task.role == "ps"} == {""}
        summary = run.summary()
        assert (summary["global_step"], summary["pushes"]["dropped"]) == (STEPS, 0)
        digests.add(summary["parameters_sha256"])
    with threadpool_limits(1):
        digests.add(zmqtrain.run(load_job(job), workers=2, ps=PS).parameters_sha256)
    assert len(digests) == 1


def test_consistent_reads_are_of_one_version_and_nothing_is_left_in_the_end(stage: Stage) -> None:
    run = stage.train(stage.job("level_job", consistent_reads=True, steps=10**6), "--workers", 3)
    stage.until_status(stage.run_address(), lambda s: s.step > 100, "a hundred steps")
    assert len(left_in(stage)) == 1
    run.signal(signal.SIGINT)
    assert run.exit_code() == ExitCode.INTERRUPTED, str(run)
    assert run.json()["ended"] == "stopped by a signal"
    assert left_in(stage) == []


def test_lane_that_a_ps_does_not_offer_ends_the_worker_that_insists(stage: Stage) -> None:
    cluster = stage.cluster(stage.job())
    ps, worker = (
        cluster.start("ps", 0, "--lane", "tcp"),
        cluster.start("worker", 0, "--lane", "shm"),
    )
    assert worker.exit_code() == ExitCode.USAGE, str(worker)
    remedy = "run both on one host .* with the same --lane, or use auto"
    text = "ERROR .*--lane .*is shm, but ps 0 cannot be reached so"
    assert worker.lines(f"{text}: .*; {remedy}"), str(worker)
    assert "Traceback" not in worker.log
    ps.signal(signal.SIGKILL)
    ps.exit_code()


def test_worker_taken_for_dead_disturbs_nobody_when_it_goes_on(stage: Stage) -> None:
    cluster = stage.cluster(long_job(stage))
    tasks = [cluster.start("ps"), cluster.start("chief")]
    zombie = cluster.start("worker", 0, "--lane", "shm")
    cluster.until_status(lambda s: steps_of(zombie, s) > 2, "steps of the first")
    zombie.signal(signal.SIGSTOP)
    tasks.append(other := cluster.start("worker", 0, "--lane", "shm"))
    cluster.until_status(lambda s: steps_of(other, s) > 2, "steps of its replacement")

    zombie.signal(signal.SIGCONT)
    assert zombie.exit_code() == ExitCode.REFUSED, str(zombie)
    assert zombie.lines("worker 0 is alive already"), str(zombie)
    stage.open_gate()
    assert [task.exit_code() for task in tasks] == [0, 0, 0], stage.report
    assert levels(stage.logdir) == {LONG}
