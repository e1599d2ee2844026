"""A job on a real Ray: a raylet is removed under its ps; nothing is lost."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.harness import Found, until
from zmqtrain.errors import ExitCode

if TYPE_CHECKING:
    from tests.harness import Stage

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]

NAME = "counting"
STEPS = 6000


class RayCluster:
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

    def until(self, condition: Callable[[], Found], what: str) -> Found:
        return until(condition, what, lambda: self.command("why", NAME).stdout)

    def command(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "zmqtrain", *command],
            cwd=self.stage.directory,
            env=self.stage.environment() | {"XDG_STATE_HOME": str(self.stage.directory / "state")},
            capture_output=True,
            text=True,
            check=False,
        )

    def zmqtrain(self, *command: str) -> str:
        """Run a command of zmqtrain; return its output, "" if it fails."""
        done = self.command(*command)
        return "" if done.returncode else done.stdout


@pytest.fixture
def ray(stage: Stage) -> Iterator[RayCluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed (zmqtrain[ray])")
    cluster = RayCluster(stage)
    try:
        yield cluster
    finally:
        cluster.end()


def until_status(
    ray: RayCluster, condition: Callable[[dict[str, Any]], object], what: str
) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        told = ray.zmqtrain("status", NAME, "--json")
        status = json.loads(told) if told else None
        return status if status and condition(status) else None

    return ray.until(found, what)


def process_of(status: dict[str, Any], role: str, index: int = 0) -> int:
    (process,) = [
        task["process"]
        for task in status["tasks"]
        if (task["role"], task["index"]) == (role, index)
    ]
    return int(process.split(":")[1])


def living_workers(status: dict[str, Any]) -> set[int]:
    return {
        task["index"]
        for task in status["tasks"]
        if task["role"] == "worker" and task["state"] != "left" and task["step"] > 0
    }


def test_job_is_killed_moved_and_scaled_and_every_batch_counts_once(
    ray: RayCluster, stage: Stage, check_counts: Callable[[Path], list[int]]
) -> None:
    fields = {"logdir": str(stage.logdir), "steps": STEPS, "save_secs": 5}
    job = stage.job("counting_job", gated=True, **fields)
    size = ("--ps", "1", "--workers", "2", "--max-workers", "9")
    where = ("--on", "ray", "--address", ray.address)
    told = ray.command("submit", job, *where, "--name", NAME, *size)
    assert told.stdout.startswith(f"{NAME} is submitted to Ray"), told.stderr
    begun = until_status(ray, lambda s: living_workers(s) == {0, 1}, "steps of two workers")
    again = ray.command("submit", job, *where, "--name", NAME)
    assert (again.returncode, "--name" in again.stderr) == (ExitCode.USAGE, True)

    victim = process_of(begun, "worker")
    os.kill(victim, signal.SIGKILL)
    killed = until_status(
        ray, lambda s: process_of(s, "worker") != victim and s["step"] > begun["step"], "a new life"
    )

    task_actor = psutil.Process(process_of(killed, "ps")).parent()
    ray.remove(task_actor.ppid())
    moved = until_status(ray, lambda s: living_workers(s) == {0, 1}, "steps with another ps")
    assert process_of(moved, "ps") != process_of(killed, "ps")

    assert ray.zmqtrain("scale", NAME, "--workers", "9")
    assert "CPU" in ray.until(lambda: ray.zmqtrain("why", NAME), "why some are not placed")
    assert ray.zmqtrain("scale", NAME, "--workers", "1")
    stage.open_gate()
    ray.until(lambda: "completed" in ray.zmqtrain("jobs", "--json"), "the end")
    assert check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}") == list(range(STEPS))
    assert ray.zmqtrain("logs", NAME, "chief")
    assert ray.zmqtrain("stop", NAME)
    assert ray.zmqtrain("jobs", "--json") == '{"jobs": []}\n'
