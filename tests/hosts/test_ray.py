"""A job on a real Ray: a raylet is removed under its ps; nothing is lost."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import Found, Stage, check_counts, until
from tests.hosts.commands import NAME, STEPS, Commands, living_workers, process_of
from zmqtrain.errors import ExitCode

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]


class RayCluster(Commands):
    """A head and some raylets, in a process of their own."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._temporary = tempfile.mkdtemp(prefix="ray-")  # short: Ray has sockets in it
        with (stage.directory / "raylets.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("raylets.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=stage.environment() | {"ZMQTRAIN_LEASE_S": "2", "TMPDIR": self._temporary},
                text=True,
            )
        self.address = self._process.stdout.readline().strip()

    def remove(self, raylet: int) -> None:
        """End a raylet, and with it all that it has started."""
        self._process.stdin.write(f"remove {raylet}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "removed\n"

    def end(self) -> None:
        self._process.communicate("end\n")
        shutil.rmtree(self._temporary)  # what actors that were killed have left there, too

    def words(self, *command: str) -> list[str]:
        return list(command)

    def until(self, condition: Callable[[], Found], what: str) -> Found:
        return until(condition, what, lambda: self.zmqtrain("why", NAME))


@pytest.fixture
def ray(stage: Stage) -> Iterator[RayCluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed (zmqtrain[ray])")
    cluster = RayCluster(stage)
    try:
        yield cluster
    finally:
        cluster.end()


def test_job_is_killed_moved_and_scaled_and_every_batch_counts_once(
    ray: RayCluster, stage: Stage
) -> None:
    fields = {"logdir": str(stage.logdir), "steps": STEPS, "save_secs": 5}
    job = stage.job("counting_job", gated=True, **fields)
    size = ("--ps", "1", "--workers", "2", "--max-workers", "9")
    where = ("--on", "ray", "--address", ray.address)
    told = ray.asked("submit", job, *where, "--name", NAME, *size)
    assert told.stdout.startswith(f"{NAME} is submitted to Ray"), told.stderr
    begun = ray.until_status(lambda s: set(living_workers(s)) == {0, 1}, "steps of two workers")
    again = ray.asked("submit", job, *where, "--name", NAME)
    assert (again.returncode, "--name" in again.stderr) == (ExitCode.USAGE, True)

    ray.steer()
    victim = process_of(begun, "worker 0")
    os.kill(victim, signal.SIGKILL)
    killed = ray.until_status(
        lambda s: process_of(s, "worker 0") != victim and s["step"] > begun["step"], "a new life"
    )

    supervisor = psutil.Process(process_of(killed, "ps 0")).parent()
    task_actor = supervisor.parent()
    ray.remove(task_actor.ppid())
    moved = ray.until_status(lambda s: set(living_workers(s)) == {0, 1}, "steps with another ps")
    assert process_of(moved, "ps 0") != process_of(killed, "ps 0")

    assert ray.zmqtrain("scale", NAME, "--workers", "9")
    assert "CPU" in ray.until(lambda: ray.zmqtrain("why", NAME), "why some are not placed")
    assert ray.zmqtrain("scale", NAME, "--workers", "1")
    stage.open_gate()
    ray.until(lambda: "completed" in ray.zmqtrain("jobs", "--json"), "the end")
    assert check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}") == list(range(STEPS))
    assert ray.zmqtrain("logs", NAME, "chief")
    assert ray.zmqtrain("stop", NAME)
    assert ray.submitted() == []
