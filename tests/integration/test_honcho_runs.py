"""The project's Procfile, started by honcho."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.harness import Process, Stage

PROCFILE = Path(__file__).parents[2] / "Procfile"


def start_honcho(stage: Stage, port: int, job: str, *arguments: str, **variables: str) -> Process:
    """Start the project's Procfile, ps 0 of which is to listen at ``port``."""
    (stage.directory / "Procfile").write_text(PROCFILE.read_text())
    variables |= {"ZMQTRAIN_BASE_PORT": str(port), "ZMQTRAIN_METRICS_PORT": "0"}
    env = {"ZMQTRAIN_JOB": job, **variables}
    return stage.start("honcho", "honcho", "start", *arguments, env=env)


def lines_of(process: str, output: str) -> list[str]:
    """Return what a process of honcho's wrote, its colours and honcho's prefix removed."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    return re.findall(rf"^\S+ {re.escape(process)} +\| (.*)$", plain, re.MULTILINE)


def exit_codes(output: str) -> dict[str, int]:
    stopped = {}
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    for process, code in re.findall(r"(\S+) stopped \(rc=(-?\d+)\)", plain):
        stopped[process] = int(code)
    return stopped


def test_sigterm_of_honcho_leaves_a_checkpoint_and_needs_no_sigkill(stage: Stage) -> None:
    logdir = {"ZMQTRAIN_LOGDIR": str(stage.logdir)}
    job = stage.job(gated=True, steps=10**6)
    (port,) = stage.free_ports(1)
    honcho = start_honcho(stage, port, job, "-c", "worker=2", **logdir)
    stage.until(lambda: re.search(r"step [1-9]\d*/", honcho.output), "the first steps")
    honcho.signal(signal.SIGTERM)
    assert honcho.exit_code() == 143, str(honcho)
    assert "SIGKILL" not in honcho.output
    tasks = {"chief.1", "ps.1", "worker.1", "worker.2"}
    assert exit_codes(honcho.output) == dict.fromkeys(tasks, 143), str(honcho)
    (saved,) = stage.logdir.glob("checkpoints/step-????????/manifest.json")
    assert f"checkpoint {saved.parent}" in lines_of("chief.1", honcho.output)
