"""A job on a real Slurm: submitted, killed, scaled, preempted, stopped; nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosts.conftest import Hosts
from tests.hosts.slurm import NODES, SlurmCluster, missing

if TYPE_CHECKING:
    from tests.harness import Stage

pytestmark = pytest.mark.hosts

NAME = "counting"
STEPS = 6000


@pytest.fixture
def slurm(stage: Stage, _able: None) -> Iterator[SlurmCluster]:
    if absent := missing():
        pytest.skip(f"{' and '.join(absent)} is not installed (slurmctld, slurmd, slurm-client)")
    with Hosts(NODES + 1) as hosts:
        cluster = SlurmCluster(stage, hosts)
        with cluster.running():
            yield cluster


def until_status(
    slurm: SlurmCluster, condition: Callable[[dict[str, Any]], object], what: str
) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        told = slurm.zmqtrain("status", NAME, "--json")
        status = json.loads(told) if told else None
        return status if status and condition(status) else None

    return slurm.stage.until(found, what)


def living_workers(status: dict[str, Any]) -> set[str]:
    return {
        f"worker {task['index']}"
        for task in status["tasks"]
        if task["role"] == "worker" and task["state"] != "left" and task["step"] > 0
    }


def requeued(slurm: SlurmCluster) -> list[str]:
    """Return the elements of the arrays of workers that wait, once all do."""
    told = slurm.run("squeue", "-h", "-r", "-n", f"{NAME}-worker", "-o", "%F_%K %T").split()
    return told[::2] if told[1::2] == ["PENDING"] * 4 else []


def names(count: int) -> set[str]:
    return {f"worker {index}" for index in range(count)}


def test_job_is_killed_scaled_and_preempted_and_every_batch_counts_once(
    slurm: SlurmCluster, stage: Stage, check_counts: Callable[[Path], list[int]]
) -> None:
    job = stage.job("counting_job", gated=True, logdir=str(stage.logdir), steps=STEPS)
    size = ("--ps", "2", "--workers", "2", "--max-workers", "4")
    where = ("--partition", "main", "--worker-partition", "spot")
    told = slurm.zmqtrain("submit", job, "--on", "slurm", "--name", NAME, *size, *where)
    assert told.startswith(f"{NAME} is submitted to Slurm")
    before = until_status(slurm, lambda s: living_workers(s) == names(2), "steps of two workers")

    (ps,) = [
        task["process"] for task in before["tasks"] if (task["role"], task["index"]) == ("ps", 1)
    ]
    os.kill(int(ps.split(":")[1]), signal.SIGKILL)
    until_status(slurm, lambda s: s["step"] > before["step"] + 50, "steps after the kill")

    assert slurm.zmqtrain("scale", NAME, "--workers", "4")
    until_status(slurm, lambda s: living_workers(s) == names(4), "steps of four workers")

    nodes = set(slurm.run("squeue", "-h", "-n", f"{NAME}-worker", "-o", "%N").split())
    large = ("--parsable", "-p", "main", "-N1", "-n1", "-c6", "--wrap", "sleep 100")
    urgent = [slurm.run("sbatch", "-w", node, *large) for node in nodes]
    preempted = until_status(slurm, lambda s: living_workers(s) < names(4), "a preemption")
    assert "worker" in slurm.zmqtrain("why", NAME)
    waiting = slurm.stage.until(lambda: requeued(slurm), "Slurm to have all of them wait")
    slurm.run("scancel", *(number.strip() for number in urgent))
    for number in waiting:  # it would let them wait for two minutes
        slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    until_status(
        slurm,
        lambda s: living_workers(s) == names(4) and s["step"] > preempted["step"],
        "all workers again",
    )

    assert slurm.zmqtrain("scale", NAME, "--workers", "1")
    until_status(slurm, lambda s: living_workers(s) == names(1), "one worker")
    stage.open_gate()
    stage.until(lambda: not slurm.run("squeue", "-h").strip(), "the end")
    assert check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}") == list(range(STEPS))
    chief = slurm.zmqtrain("logs", NAME, "chief")
    assert "0 dropped" in chief
    assert slurm.zmqtrain("stop", NAME)
    assert slurm.zmqtrain("jobs", "--json") == '{"jobs": []}\n'


def test_job_that_is_stopped_leaves_nothing_and_the_next_goes_on(
    slurm: SlurmCluster, stage: Stage
) -> None:
    job = stage.job("counting_job", gated=True, logdir=str(stage.logdir), steps=STEPS)
    submit = ("submit", job, "--on", "slurm", "--name", NAME, "--ps", "1", "--workers", "2")
    assert slurm.zmqtrain(*submit)
    until_status(slurm, lambda s: s["step"] > 5, "steps")
    assert not slurm.zmqtrain(*submit), "the name is taken"

    assert slurm.zmqtrain("stop", NAME).startswith("stopped by")
    stage.until(lambda: not slurm.run("squeue", "-h").strip(), "nothing to be left")
    assert slurm.zmqtrain(*submit)
    status = until_status(slurm, lambda s: s["initialised"], "the next life")
    assert status["step"] > 5
    assert slurm.zmqtrain("stop", NAME)
