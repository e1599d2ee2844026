"""`zmqtrain run` and the processes of its tasks: what they print, how they fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.harness import Stage
from zmqtrain.errors import ExitCode
from zmqtrain.observe.logs import LogLine

pytestmark = pytest.mark.integration

MODEL = """
import logging, os, sys, warnings
from zmqtrain import Job
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import Adam

class Model(MLP):
    steps = 0

    def loss_and_gradients(self, parameters, batch, out):
        Model.steps += 1
        if Model.steps == 3:
            {third_step}
        return super().loss_and_gradients(parameters, batch, out)

job = Job(
    model=Model(features=64, hidden=8, classes=10), data=Digits(), optimizer=Adam(), steps={steps}
)
"""

IN_THE_CHIEF = """
def metrics(self, parameters, batch):
    if Model.steps == 0:
        breakpoint()
    return MLP.metrics(self, parameters, batch)

Model.metrics = metrics
"""


def job_with(stage: Stage, third_step: str, steps: int = 40) -> str:
    """Write a job whose model does something in each worker's third step; return its path."""
    path = stage.directory / "job.py"
    path.write_text(MODEL.format(third_step=third_step, steps=steps))
    return str(path)


def test_what_a_worker_prints_appears_with_its_name_and_another_one_is_debugged(
    stage: Stage,
) -> None:
    said = "print('hello'); warnings.warn('careful'); logging.getLogger('mine').warning('look')"
    job = job_with(stage, f"breakpoint()\n            {said}")
    with Path(job).open("a") as file:
        file.write(IN_THE_CHIEF)
    flags = ("--policy", "sync-replicas", "--debug", "1", "--profile", "steps")
    command = (sys.executable, "-m", "zmqtrain", "run", job, *flags)
    run = stage.start("run", *command, stdin="print(Model.steps * 14)\ncontinue\n")
    assert run.exit_code() == ExitCode.OK, str(run)
    for text in ("(Pdb) 42", "hello", "global step 40"):  # worker 1 has the terminal
        assert text in run.output
    assert len(list((stage.directory / "steps").glob("worker-[01].prof"))) == 2
    assert "worker 0 | hello" in run.log.splitlines()
    assert run.lines(r"^worker 0 \| .*UserWarning: careful$")
    assert run.lines(r" WARNING worker 0: look$")


def test_worker_that_ends_before_the_job_with_code_0_is_a_failure(stage: Stage) -> None:
    run = stage.train(job_with(stage, "sys.exit(0)"), "--workers", 1)
    assert run.exit_code() == ExitCode.CRASH, str(run)
    said = run.json()
    assert said["exit_code"] == ExitCode.CRASH
    assert said["ended"].startswith("worker 0 ended with exit code 0 after")
    assert "sys.exit" in said["ended"]


def test_log_as_json_holds_one_object_a_line_and_nothing_is_left_open_at_the_end(
    stage: Stage,
) -> None:
    """What is closed by the garbage collector alone may keep the event loop from closing."""
    flags = ("run", job_with(stage, "print('hello')"), "--workers", "1", "--log-format", "json")
    run = stage.start("run", sys.executable, "-W", "error", "-m", "zmqtrain", *flags, "--json")
    run.summary()
    assert not run.lines("ResourceWarning"), str(run)
    objects = [json.loads(line) for line in run.log.splitlines()]
    assert {"task": "worker 0", "message": "hello"} in objects
    logged = [LogLine.parsed(line) for line in run.log.splitlines()]
    assert any(line is not None and line.task == "chief 0" for line in logged)


def test_files_beside_the_job_may_be_called_as_modules_of_others(stage: Stage) -> None:
    for name in ("queue", "random", "numpy"):
        (stage.directory / f"{name}.py").write_text("raise RuntimeError('imported by mistake')")
    # As the console script is started: not with the current directory on Python's path.
    flags = ("-P", "-m", "zmqtrain", "run", stage.job(steps=20), "--json")
    stage.start("run", sys.executable, *flags).summary()
