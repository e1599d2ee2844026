"""Someone who submits a job to an engine and asks for it: what the tests of all engines share."""

from __future__ import annotations

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tests.harness import Found, Stage
from zmqtrain.errors import ExitCode

NAME = "counting"
STEPS = 6000
POLICY = "bounded-staleness:9"

ReadStatus = dict[str, Any]


class Commands(ABC):
    """Commands on the host of the submitter, in a home of its own."""

    stage: Stage

    @abstractmethod
    def words(self, *command: str) -> list[str]:
        """Return how a command is run on that host."""

    @property
    def variables(self) -> dict[str, str]:
        return self.stage.environment() | {"XDG_STATE_HOME": str(self.stage.directory / "state")}

    def command(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(*command),
            cwd=self.stage.directory,
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
        )

    def run(self, *command: str) -> str:
        """Run a command; return its output, "" if it fails."""
        done = self.command(*command)
        return "" if done.returncode else done.stdout

    def asked(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of zmqtrain."""
        return self.command(sys.executable, "-m", "zmqtrain", *command)

    def zmqtrain(self, *command: str) -> str:
        """Run a command of zmqtrain; return its output, "" if it fails."""
        return self.run(sys.executable, "-m", "zmqtrain", *command)

    def until(self, condition: Callable[[], Found], what: str) -> Found:
        """Return the first value of ``condition`` that is true."""
        return self.stage.until(condition, what)

    def status(self) -> ReadStatus | None:
        """Return the status of the job, None if nobody answers."""
        told = self.zmqtrain("status", NAME, "--json")
        return json.loads(told) if told else None

    def submitted(self) -> list[dict[str, Any]]:
        """Return the jobs that were submitted and not stopped."""
        found: list[dict[str, Any]] = json.loads(self.zmqtrain("jobs", "--json"))["jobs"]
        return found

    def steer(self) -> None:
        """Have a checkpoint saved and the policy changed, by the job's name."""
        assert "checkpoints/step-" in self.zmqtrain("save", NAME)
        assert self.zmqtrain("policy", NAME, POLICY).startswith(f"{POLICY} from step ")
        self.until_status(lambda s: s["policy"] == POLICY, "the new policy")

    def renew_keys(self, workers: int) -> None:
        """Give the job new keys; wait until chief and workers have them, and all make steps."""
        before = self.until_status(lambda s: len(living_workers(s)) == workers, "all workers")
        told = self.asked("keys", "rotate", NAME)
        assert told.returncode == ExitCode.OK, told.stderr
        names = ["chief 0", *(f"worker {index}" for index in range(workers))]
        self.until_status(
            lambda s: (
                len(living_workers(s)) == workers
                and not any(process_of(s, name) == process_of(before, name) for name in names)
            ),
            "steps of all with new keys",
        )

    def until_status(self, condition: Callable[[ReadStatus], object], what: str) -> ReadStatus:
        """Return the first status for which ``condition`` is true."""
        return self.stage.until_told(self.status, condition, what)


def process_of(status: ReadStatus, name: str) -> int:
    (process,) = [
        task["process"] for task in status["tasks"] if f"{task['role']} {task['index']}" == name
    ]
    return int(process.split(":")[1])


def living_workers(status: ReadStatus) -> dict[int, int]:
    """Return the steps of this life of each worker that has made some and has not left."""
    return {
        task["index"]: task["step"]
        for task in status["tasks"]
        if task["role"] == "worker" and task["state"] != "left" and task["step"] > 0
    }
