"""Runs on a system without the calls that Linux alone has, such as macOS."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ONLY_LINUX = {
    "fcntl": ("F_OFD_GETLK", "F_OFD_SETLK", "F_OFD_SETLKW", "F_ADD_SEALS", "F_GET_SEALS"),
    "mmap": ("MADV_REMOVE", "MAP_NORESERVE", "MAP_POPULATE"),
    "os": (
        *("sched_getaffinity", "sched_setaffinity"),
        *("memfd_create", "eventfd", "pidfd_open", "posix_fallocate", "posix_fadvise"),
        *("copy_file_range", "getrandom", "pipe2", "splice", "setns", "unshare"),
    ),
    "select": ("epoll",),
    "signal": ("pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "SIGPWR"),
    "socket": ("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_USER_TIMEOUT"),
    "time": ("CLOCK_BOOTTIME",),
}

CUSTOMIZE = f"""
import importlib, os
os.process_cpu_count = os.cpu_count
for name, calls in {ONLY_LINUX!r}.items():
    for module in map(importlib.import_module, {{name, {{"os": "posix"}}.get(name, name)}}):
        for call in calls:
            vars(module).pop(call, None)
"""

JOB = """
from zmqtrain import Job
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import SGD

model = MLP(features=64, hidden=16, classes=10)
job = Job(model=model, data=Digits(), optimizer=SGD(0.1), steps=20)
"""

SCRIPT = """
import zmqtrain
from job import job

summary = zmqtrain.run(job, workers=2)
assert summary.global_step == 20, summary
"""


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python there, without the calls; the processes that it starts lack them, too."""
    texts = {"sitecustomize": CUSTOMIZE, "job": JOB, "script": SCRIPT}
    for name, text in texts.items():
        (directory / f"{name}.py").write_text(text)
    with tempfile.TemporaryDirectory() as short:  # enough for sockets
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(directory), "TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=100,
        )


@pytest.mark.parametrize(
    "arguments",
    [("script.py",), ("-m", "zmqtrain", "run", "job.py", "--workers", "2")],
    ids=["in a script", "in processes"],
)
def test_small_job_trains(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
