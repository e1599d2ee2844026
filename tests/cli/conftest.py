"""A job that is no process: its status, and a ps 0 that answers as it is told to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.leader import FakePs, leader
from zmqtrain.cli import remote
from zmqtrain.config.run_file import RunningJob
from zmqtrain.config.task import ENVIRON
from zmqtrain.protocol.status import State, Status, TaskStatus, Wait

__all__ = ["leader"]

JOINED = 1_763_690_400_000  # Friday, 21 November 2025, 02:00 UTC, in milliseconds


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the outside says which job is meant."""
    for name in list(ENVIRON):
        if name.startswith("ZMQTRAIN_") or name in ("TF_CONFIG", "HONCHO_PROCESS_NAME"):
            monkeypatch.delenv(name)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[RunningJob]:
    """The jobs that run on this host; none until a test adds one."""
    running: list[RunningJob] = []
    monkeypatch.setattr(remote, "running_jobs", lambda: list(running))
    return running


@pytest.fixture
def ps(leader: FakePs, jobs: list[RunningJob]) -> FakePs:
    """Ps 0 of the one job on this host."""
    jobs.append(RunningJob(4711, "digits.py", ("127.0.0.1:2222", "127.0.0.1:2223"), "chief 0"))
    return leader


@pytest.fixture
def training() -> Status:
    """Two ps and two workers in the middle of a job; worker 1 keeps worker 0 waiting."""
    return Status(
        event=3,
        initialised=True,
        policy="sync-replicas",
        strategy="parameter-server",
        exchange="direct",
        switching="",
        step=1200,
        steps=3000,
        stop="",
        failure="",
        failure_code=0,
        all_delivered=False,
        save_wanted=False,
        seconds=12.0,
        steps_per_second=100.0,
        loss=0.25,
        examples=120000,
        pushes={"applied": 2400, "dropped": 3, "duplicate": 1, "refused": 0},
        staleness={"mean": 0.5, "p50": 0.0, "p99": 2.0, "max": 4.0},
        tasks=(
            task("ps 0", "serving", 1200, incarnation=0, silent_s=0.0, nbytes=16384),
            task("ps 1", "alive", 1198, nbytes=2856),
            task("chief 0", "alive", 800),
            task("worker 0", "waiting", 1205, leases=(2410,), loss=0.25, lanes="shm,shm", behind=0),
            task(
                "worker 1",
                "computing",
                1195,
                leases=(2411, 2412, 2413, 2414, 2415),
                loss=0.5,
                lanes="shm,tcp",
                behind=3,
            ),
        ),
        waits=(
            Wait("chief 0", "ps 0", "it has not reported the status", 0.1),
            Wait("worker 0", "worker 1", "step 1200 has 1 of 2 gradients", 3.25, 296.75),
            Wait("worker 0", "ps 0", "it has not answered push 1205", 3.3),
        ),
    )


def task(name: str, state: State, step: int, **changes: Any) -> TaskStatus:
    values: dict[str, Any] = {
        "incarnation": JOINED,
        "silent_s": 0.042,
        "leases": (),
        "loss": float("nan"),
        "process": "host:100",
        "metrics": "127.0.0.1:9410",
        "lanes": "",
    }
    role, index = name.split()
    return TaskStatus(role, int(index), state, step=step, **values | changes)
