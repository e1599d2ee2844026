"""A job on a real Slurm: submitted, killed, scaled, preempted, stopped; nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.harness import Stage, check_counts
from tests.hosts.commands import NAME, STEPS, living_workers, process_of
from tests.hosts.conftest import Hosts
from tests.hosts.slurm import NODES, SlurmCluster, missing

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


@pytest.fixture
def slurm(stage: Stage, _able: None) -> Iterator[SlurmCluster]:
    if absent := missing():
        pytest.skip(f"{' and '.join(absent)} is not installed (slurmctld, slurmd, slurm-client)")
    with Hosts(NODES + 1) as hosts:
        cluster = SlurmCluster(stage, hosts)
        with cluster.running():
            yield cluster


def requeued(slurm: SlurmCluster) -> list[str]:
    """Return the elements of the arrays of workers that wait, once all do."""
    told = slurm.run("squeue", "-h", "-r", "-n", f"{NAME}-worker", "-o", "%F_%K %T").split()
    return told[::2] if told[1::2] == ["PENDING"] * 4 else []


def test_job_is_killed_scaled_and_preempted_and_every_batch_counts_once(
    slurm: SlurmCluster, stage: Stage
) -> None:
    job = stage.job("counting_job", gated=True, logdir=str(stage.logdir), steps=STEPS)
    size = ("--ps", "2", "--workers", "2", "--max-workers", "4")
    own = ("--env", f"ZMQTRAIN_SEGMENT_DIR={stage.segments}", "--log-format", "json")
    where = ("--partition", "main", "--worker-partition", "spot")
    told = slurm.zmqtrain("submit", job, "--on", "slurm", "--name", NAME, *size, *where, *own)
    assert told.startswith(f"{NAME} is submitted to Slurm")
    before = slurm.until_status(lambda s: len(living_workers(s)) == 2, "steps of two workers")

    os.kill(process_of(before, "ps 1"), signal.SIGKILL)
    slurm.until_status(lambda s: s["step"] > before["step"] + 50, "steps after the kill")

    slurm.steer()
    assert slurm.zmqtrain("scale", NAME, "--workers", "4")
    slurm.renew_keys(workers=4)

    nodes = set(slurm.run("squeue", "-h", "-n", f"{NAME}-worker", "-o", "%N").split())
    large = ("--parsable", "-p", "urgent", "--exclusive", "-N1", "--wrap", "sleep 100")
    urgent = [slurm.run("sbatch", "-w", node, *large) for node in nodes]
    preempted = slurm.until_status(lambda s: len(living_workers(s)) < 4, "a preemption")
    assert "worker" in slurm.zmqtrain("why", NAME)
    waiting = slurm.stage.until(lambda: requeued(slurm), "Slurm to have all of them wait")
    slurm.run("scancel", *(number.strip() for number in urgent))
    for number in waiting:  # it would let them wait for two minutes
        slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    slurm.until_status(
        lambda s: len(living_workers(s)) == 4 and s["step"] > preempted["step"], "all workers again"
    )

    assert slurm.zmqtrain("scale", NAME, "--workers", "1")
    slurm.until_status(lambda s: len(living_workers(s)) == 1, "one worker")
    stage.open_gate()
    stage.until(lambda: not slurm.run("squeue", "-h").strip(), "the end")
    assert check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}") == list(range(STEPS))
    chief = [json.loads(line) for line in slurm.zmqtrain("logs", NAME, "chief").splitlines()]
    assert chief[-1]["pushes"]["dropped"] == 0, "the summary"
    shown = slurm.zmqtrain("logs", NAME, "--json").splitlines()
    assert {"ps 0", "ps 1", "worker 0"} <= {json.loads(line).get("task") for line in shown}
    (listed,) = slurm.submitted()
    assert listed["state"] == "completed"
    assert slurm.zmqtrain("stop", NAME)
    assert slurm.submitted() == []


@pytest.mark.parametrize("ps", [1, 0])
def test_job_that_is_stopped_leaves_nothing_and_the_next_goes_on(
    slurm: SlurmCluster, stage: Stage, ps: int
) -> None:
    job = stage.job("counting_job", gated=True, logdir=str(stage.logdir), steps=STEPS)
    own = ("--env", f"ZMQTRAIN_SEGMENT_DIR={stage.segments}")
    size = ("--ps", str(ps), "--workers", "2", "--cpu", "2", "--ps-cpu", "2")
    nodes = ("--constraint", "fast", "--exclude", "n3", "--gres", "disk:1", "--time", "60")
    more = ("--sbatch", "--nice=10 --comment=drill")
    submit = ("submit", job, "--on", "slurm", "--name", NAME, *size, *nodes, *more, *own)
    assert slurm.zmqtrain(*submit)
    for shown in slurm.run("scontrol", "show", "job").strip().split("\n\n"):
        for word in ("Features=fast", "ExcNodeList=n3", "gres:disk:1", "Comment=drill", "01:00:00"):
            assert word in shown
    slurm.until_status(lambda s: s["step"] > 5, "steps")
    steps = slurm.run("scontrol", "show", "step").split("StepId=")
    cpus = {found[1] for found in (re.search(r"CPUs=(\d+)", step) for step in steps) if found}
    assert cpus == {"0", "2"}, "of the scripts, which are steps, too, and of the tasks"
    assert not slurm.zmqtrain(*submit), "the name is taken"

    assert slurm.zmqtrain("stop", NAME).startswith("stopped by")
    stage.until(lambda: not slurm.run("squeue", "-h").strip(), "nothing to be left")
    assert slurm.zmqtrain(*submit)
    status = slurm.until_status(lambda s: s["initialised"], "the next life")
    assert status["step"] > 5
    assert slurm.zmqtrain("stop", NAME)
