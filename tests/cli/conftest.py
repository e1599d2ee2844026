"""A job that is no process: its status, and a ps 0 that answers as it is told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from zmqtrain.cli import remote
from zmqtrain.config.run_file import RunningJob
from zmqtrain.config.task import ENVIRON
from zmqtrain.errors import PeerLostError, ZmqTrainError
from zmqtrain.protocol.status import State, Status, TaskStatus, Wait
from zmqtrain.transport.security import Security
from zmqtrain.wire.messages import Message

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


@dataclass
class FakePs:
    """Answers each kind of message with the next of its replies; the last one stays."""

    replies: dict[type, list[Any]] = field(default_factory=dict)
    asked: list[tuple[str, Message, float]] = field(default_factory=list)
    on_error: Callable[[], None] = lambda: None  # called before one is raised
    security: Security | None = None  # of the last question

    def ask(
        self, address: str, message: Message, *, timeout_s: float, security: Security | None = None
    ) -> Message:
        self.security = security
        self.asked.append((address, message, timeout_s))
        silence = PeerLostError(f"ps 0 at {address} did not answer within {timeout_s:g} s")
        replies = self.replies.get(type(message), [silence])
        reply = replies[0] if len(replies) == 1 else replies.pop(0)
        if isinstance(reply, ZmqTrainError | KeyboardInterrupt):
            self.on_error()
            raise reply
        return reply

    def questions(self, kind: type) -> list[Any]:
        return [message for _, message, _ in self.asked if isinstance(message, kind)]


@pytest.fixture
def ps(monkeypatch: pytest.MonkeyPatch, jobs: list[RunningJob]) -> FakePs:
    """Ps 0 of the one job on this host."""
    fake = FakePs()
    monkeypatch.setattr(remote, "ask", fake.ask)
    jobs.append(RunningJob(4711, "digits.py", ("127.0.0.1:2222", "127.0.0.1:2223"), "chief 0"))
    return fake


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
