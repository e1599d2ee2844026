"""Tasks as processes that are forked: as if each had been started by itself."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.harness import until
from zmqtrain.errors import ExitCode, PeerLostError
from zmqtrain.local.fork_server import ForkServer, TaskProcess

JOB = """
import os
import numpy as np
from zmqtrain import Job
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import SGD

print("random", np.random.random(), "input", os.read(0, 1), flush=True)
job = Job(
    model=MLP(64, 5, 10), data=Digits(), optimizer=SGD(0.1), policy="hogwild", batch_size=9, steps=1
)
"""

pytestmark = pytest.mark.integration


@pytest.fixture
async def fork_server() -> AsyncIterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


async def waiting_ps(fork_server: ForkServer, job: Path) -> TaskProcess:
    """Start a ps that nobody will ever call."""
    return await fork_server.start("ps", flags_of(job), job.parent / "ps.log")


def flags_of(job: Path) -> list[str]:
    """Return those of a ps that leaves nothing outside the job's directory when it is killed."""
    where = ["--ps", f"ipc://{job.parent}/s", "--segment-dir", str(job.parent / "segments")]
    return ["--job", str(job), *where, "--metrics-port", "0"]


async def test_task_ends_with_its_exit_code_and_says_why_in_its_log(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    log.write_text("before\n")
    task = await fork_server.start("worker", ["--nope"], log)
    assert await task.wait() == task.returncode == ExitCode.USAGE
    assert log.read_text().startswith("before\n")
    assert "No such option" in log.read_text()
    task.signal(signal.SIGKILL)  # of which nothing comes


async def test_tasks_share_neither_random_numbers_nor_input(
    fork_server: ForkServer, job: Path
) -> None:
    said = set()
    for name in ("a", "b"):
        log = job.parent / name
        task = await fork_server.start(
            "worker", ["--job", str(job), "--join-timeout-s", "0.5"], log
        )
        assert await task.wait() == ExitCode.PEER_LOST
        said.add(log.read_text().splitlines()[0])
    assert len(said) == 2
    pattern = r"random 0\.\d+ input b''"
    assert all(re.fullmatch(pattern, line) for line in said), said


async def test_killed_task_is_told_of_and_can_be_started_again(
    fork_server: ForkServer, job: Path
) -> None:
    for _ in range(2):
        task = await waiting_ps(fork_server, job)
        assert task.returncode is None
        assert psutil.Process(task.pid).is_running()
        task.signal(signal.SIGKILL)
        assert await task.wait() == -signal.SIGKILL
        assert not psutil.pid_exists(task.pid)


async def test_tasks_end_with_the_process_that_tells_of_them(
    fork_server: ForkServer, job: Path
) -> None:
    task = await waiting_ps(fork_server, job)
    parent_of(task).kill()
    assert await task.wait() == -signal.SIGKILL
    with pytest.raises(PeerLostError, match="process from which tasks are forked has ended"):
        fork_server.check()
    with pytest.raises(PeerLostError, match="process from which tasks are forked has ended"):
        await waiting_ps(fork_server, job)


async def test_tasks_are_forked_from_a_process_with_one_thread(
    fork_server: ForkServer, job: Path
) -> None:
    """Of others only the locks that they hold would be in a fork."""
    task = await waiting_ps(fork_server, job)
    assert parent_of(task).num_threads() == 1


def parent_of(task: TaskProcess) -> psutil.Process:
    parent: psutil.Process = psutil.Process(task.pid).parent()
    return parent


async def test_tasks_are_asked_to_end_when_nobody_minds_them(
    fork_server: ForkServer, job: Path
) -> None:
    task = psutil.Process((await waiting_ps(fork_server, job)).pid)
    log = job.parent / "ps.log"
    until(lambda: log.exists() and "listening" in log.read_text(), "a ps that listens", str)
    fork_server.close()
    task.wait(timeout=30)
    assert "leaving without the chief's shutdown" in log.read_text()


async def test_task_that_nobody_waits_for_any_more_is_killed(
    fork_server: ForkServer, job: Path
) -> None:
    """Those after it are told of all the same."""
    first = await waiting_ps(fork_server, job)
    forked = parent_of(first)
    cancelled = asyncio.ensure_future(waiting_ps(fork_server, job))
    await asyncio.sleep(0)  # it has asked
    cancelled.cancel()
    other = await fork_server.start("worker", ["--nope"], job.parent / "log")
    assert await other.wait() == ExitCode.USAGE
    first.signal(signal.SIGKILL)
    assert await first.wait() == -signal.SIGKILL
    until(lambda: not forked.children(), "the end of all tasks", str)


def test_tasks_end_though_their_caller_died_with_news_unread(job: Path) -> None:
    """Then the end of its socket is an error."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "zmqtrain.local.fork_server"]
    server = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
    theirs.close()
    for role, arguments in (("ps", flags_of(job)), ("worker", ["--nope"])):
        request = {"role": role, "arguments": arguments, "log": str(job.parent / role)}
        ours.sendall(json.dumps(request).encode() + b"\n")
    until(lambda: b"code" in ours.recv(1 << 16, socket.MSG_PEEK), "news of the worker", str)
    log = job.parent / "ps"
    until(lambda: "listening" in log.read_text(), "a ps that listens", str)
    ours.close()
    assert server.wait(timeout=30) == 0
    until(lambda: "leaving without" in log.read_text(), "the end of the ps", log.read_text)
