"""Processes that wait to be tasks; they are forked in a process of their own, without threads."""

from __future__ import annotations

import sys
import threading

import pytest

from tests.harness import Stage
from zmqtrain.local.forked import forked

SCRIPT = """
import asyncio, os, signal, sys
from zmqtrain.config.cluster import Role
from zmqtrain.local.forked import forked

async def lives(helped, killed):
    helped.begin(Role.WORKER, ["--help"], 1)
    os.kill(killed.pid, signal.SIGKILL)
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    killed.begin(Role.PS, ["--help"], 1)
    return [await helped.wait(), await helped.wait(), await killed.wait()]

with forked(3) as processes:
    assert len(processes) == 3
    ended = asyncio.run(lives(*processes[:2]))
assert ended == [0, 0, -signal.SIGKILL], ended
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("none is left")
"""

INTERRUPTED = """
import os, signal
from zmqtrain.local.forked import forked

os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
try:
    with forked(1):
        print("Ctrl-C was lost")
except KeyboardInterrupt:
    print("stopped")
"""

FAILING = """
import os, signal
from zmqtrain.local.forked import ForkedProcess

def full():
    raise BlockingIOError("no more processes")

os.fork = full
try:
    ForkedProcess([])
except BlockingIOError:
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""

only_where_something_is_forked = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere nothing is forked"
)


def run(stage: Stage, script: str) -> str:
    """Run a script that writes no errors; return what it prints."""
    path = stage.directory / "script.py"
    path.write_text(script)
    process = stage.start("script", sys.executable, path)
    assert process.exit_code() == 0 and process.log == "", str(process)
    return process.output


@only_where_something_is_forked
def test_forked_process_becomes_a_task_and_one_that_is_not_needed_ends(stage: Stage) -> None:
    output = run(stage, SCRIPT)
    assert "Usage: python -m zmqtrain.roles.worker" in output
    assert output.endswith("none is left\n")


@only_where_something_is_forked
def test_interrupt_during_a_fork_is_raised_after_it(stage: Stage) -> None:
    assert run(stage, INTERRUPTED) == "stopped\n"


def test_process_with_threads_forks_none() -> None:
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    with forked(2) as processes:
        assert processes == []
    may_end.set()
    thread.join()


@only_where_something_is_forked
def test_fork_that_fails_lets_interrupts_through(stage: Stage) -> None:
    assert run(stage, FAILING) == "False\n"
