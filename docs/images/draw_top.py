"""Draws `zmqtrain top` of a real run, one of whose workers is killed.

python docs/images/draw_top.py JOB [OPTIONS OF zmqtrain run]
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from io import StringIO
from pathlib import Path

from rich.console import Console

from zmqtrain.chief.status_history import StatusHistory
from zmqtrain.cli.remote import OPTIONS, RemoteJob, find_job
from zmqtrain.cli.top import SHOWN_NEWS, statuses
from zmqtrain.cli.top_view import top_view
from zmqtrain.errors import ZmqTrainError
from zmqtrain.protocol.status import Status

KILL_AFTER_S = 6.0
SHOWN_AFTER_S = 25.0


def draw(job: list[str], path: Path) -> None:
    command = [sys.executable, "-m", "zmqtrain", "run", *job]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            watch(wait_for_job(), path)
        finally:
            run.terminate()


def watch(job: RemoteJob, path: Path) -> None:
    console = Console(record=True, width=84, height=24, file=StringIO(), force_terminal=True)
    watched, news, killed = StatusHistory(), deque[str](maxlen=SHOWN_NEWS), False
    began = time.monotonic()
    for status in statuses(job):
        now = time.monotonic()
        clock = time.strftime("%H:%M:%S")
        news += (f"{clock}  {text}" for text in watched.take(status, now))
        if now - began > KILL_AFTER_S and status is not None and not killed:
            kill_last_worker(status)
            killed = True
        if now - began > SHOWN_AFTER_S:
            break
    console.print(top_view(watched, job.name, news, console))
    svg = console.export_svg(title="zmqtrain top")
    path.write_text(re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL))  # it is elsewhere


def wait_for_job() -> RemoteJob:
    while True:
        try:
            job = find_job(dict.fromkeys(OPTIONS), 5.0)
            if job.status().step > 0:
                return job
        except ZmqTrainError:
            pass
        time.sleep(0.5)


def kill_last_worker(status: Status) -> None:
    process = [task.process for task in status.tasks if task.role == "worker"][-1]
    os.kill(int(process.rpartition(":")[2]), signal.SIGKILL)


if __name__ == "__main__":
    draw(sys.argv[1:], Path(__file__).parent / "top.svg")
