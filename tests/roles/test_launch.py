"""What a process of a role does before its task begins."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import psutil
import pytest

import zmqtrain
from tests.harness import Stage
from zmqtrain import Job
from zmqtrain.config import run_file
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.invoke import invoke
from zmqtrain.config.task import TaskConfig
from zmqtrain.data import NoisyLine
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.roles import launch
from zmqtrain.server.server import ParameterServer
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.wire.messages import Shutdown

FEW = 256  # files
TF_CONFIG = json.dumps(
    {
        "cluster": {"ps": ["a:2222", "b:2222"], "worker": ["c:2222"]},
        "task": {"type": "ps", "index": 1},
    }
)


def test_task_may_open_as_many_files_as_the_system_lets_it_before_it_serves() -> None:
    def allowed() -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, most))
    try:
        assert launch.run_process(config_of("127.0.0.1:2222"), allowed) == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def no_directory() -> int:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")


def test_host_without_a_writable_directory_is_a_mistake_with_its_remedy(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a container with a read-only root and no tmpfs, wherever Python first needs one."""
    assert launch.run_process(config_of("127.0.0.1:2222"), no_directory) == ExitCode.USAGE
    assert invoke(click.Command("command", callback=no_directory), "command", []) == ExitCode.USAGE
    for told in (caplog.text, capsys.readouterr().err):
        assert "set TMPDIR to a directory" in told and "Traceback" not in told


def test_first_process_of_a_container_heeds_sigterm_while_it_loads_the_job(stage: Stage) -> None:
    job, loads = stage.directory / "job.py", stage.directory / "loads"
    job.write_text(f"import time\nopen({str(loads)!r}, 'w')\ntime.sleep(3600)\n")
    unshare = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    if not shutil.which("unshare") or subprocess.call([*unshare, "true"]):
        pytest.skip("needs a PID namespace")
    role = (sys.executable, "-m", "zmqtrain.roles.worker", "--job", job)
    process = stage.start("unshare", *unshare, *role)
    stage.until(loads.exists, "the job's file to be run")
    (first,) = psutil.Process(process.pid).children()
    first.terminate()
    assert process.exit_code() == ExitCode.TERMINATED


@pytest.mark.parametrize(
    ("arguments", "environ", "started"),
    [
        (["--role", "ps"], {}, Task(Role.PS, 0)),
        (["--role", "ps"], {"ZMQTRAIN_ROLE": "worker"}, Task(Role.PS, 0)),
        ([], {"ZMQTRAIN_ROLE": "chief", "SLURM_PROCID": "3"}, Task(Role.CHIEF, 0)),
        (
            ["--workers", "4"],
            {"ZMQTRAIN_ROLE": "worker", "SLURM_PROCID": "3"},
            Task(Role.WORKER, 3),
        ),
        ([], {"TF_CONFIG": TF_CONFIG}, Task(Role.PS, 1)),
    ],
)
def test_one_entry_starts_the_task_of_every_role(
    arguments: list[str],
    environ: dict[str, str],
    started: Task,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = []

    def note(config: TaskConfig, run: object) -> int:
        tasks.append(config.task)
        return 0

    monkeypatch.setattr(launch, "run_process", note)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert launch.launch(None, ["--job", "examples/digits.py", *arguments]) == 0
    assert tasks == [started]


def test_task_without_a_role_says_how_to_give_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.launch(None, ["--job", "examples/digits.py"]) == ExitCode.USAGE
    assert "--role (or ZMQTRAIN_ROLE)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "address", "files"),
    [
        ("chief 0", "127.0.0.1:2222", 1),
        ("ps 0", "127.0.0.1:2222", 1),
        ("ps 1", "127.0.0.1:2222", 0),
        ("worker 0", "127.0.0.1:2222", 0),
        ("chief 0", "ipc:///tmp/ps-0.sock", 1),
        ("ps 0", "ipc:///tmp/ps-0.sock", 0),
    ],
)
def test_job_is_published_by_those_who_will_do(
    task: str, address: str, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.ExitStack() as stack:
        launch._publish(parse_task(task), config_of(address), stack)
        assert len(list(tmp_path.glob("*/*.json"))) == files


def test_ps_that_cannot_publish_the_job_serves_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"zmqtrain-{os.getuid()}").touch()
    with contextlib.ExitStack() as stack:
        launch._publish(parse_task("ps 0"), config_of("127.0.0.1:2222"), stack)
        assert "can find the job only by its chief" in caplog.text
        with pytest.raises(ConfigError):
            launch._publish(parse_task("chief 0"), config_of("127.0.0.1:2222"), stack)


def test_host_of_a_ps_knows_of_the_end_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = config_of("127.0.0.1:2222")
    job = Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD())
    ps = ParameterServer(config, job, MemoryTransport())
    launch._note_end([ps], config)
    assert run_file.end_since(config.ps, 0.0) is None
    ps._shutdown = Shutdown(ExitCode.DIVERGED, "too many gradients held NaN")
    launch._note_end([ps], config)
    assert run_file.end_since(config.ps, 0.0) == ExitCode.DIVERGED


@pytest.mark.parametrize(
    ("given", "leaves"),
    [
        ({}, False),
        ({"on_term": "leave"}, True),
        ({"group": 2}, True),
        ({"group": 2, "hosted": True, "workers": 1}, False),  # its part may be asked for
    ],
)
async def test_worker_that_comes_too_late_for_a_job_that_is_done_leaves_if_it_may_be_no_other_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], leaves: bool
) -> None:
    job = Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD(), steps=1)
    job = job.model_copy(update={"logdir": str(tmp_path)})
    await asyncio.to_thread(zmqtrain.run, job)
    monkeypatch.setattr(launch, "CHECK_S", 0.0)
    has_joined, codes = iter([False, True]), []

    class Late:
        @property
        def has_met(self) -> bool:
            return next(has_joined)

        def stop(self, code: int) -> None:
            codes.append(code)

    worker = Late()
    worker.job = job
    config = config_of("127.0.0.1:2222").model_copy(update={"role": Role.WORKER, **given})
    await launch._leave_with_the_job([worker], config, None)
    assert codes == [ExitCode.OK] * leaves


@pytest.mark.parametrize("ps", ["127.0.0.1:2222", "ipc:///of/zmqtrain/run.sock"])
def test_mistyped_variable_is_told_once(
    ps: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZMQTRAIN_WORKER", "3")
    arguments = ["--job", "nowhere.py", "--ps", ps, "--workers", "1"]
    assert launch.launch(Role.PS, arguments) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert ("ZMQTRAIN_WORKER is set" in told) == (not ps.startswith("ipc:"))


def test_cluster_that_contradicts_the_strategy_is_told_before_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--job", "nowhere.py", "--workers", "3", "--strategy", "mirrored"]
    assert launch.launch(Role.WORKER, arguments) == ExitCode.USAGE
    assert "TF_CONFIG gives 3; expected 1" in capsys.readouterr().err


def test_chief_that_computes_runs_the_own_loop_as_other_workers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        "from zmqtrain import Job\n"
        "from zmqtrain.data import NoisyLine\n"
        "from zmqtrain.models import LinearRegression\n"
        "from zmqtrain.optim import SGD\n"
        "job = Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD(), own_loop=True)\n"
    )
    cluster = {"chief": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"]}
    task = {"type": "chief", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    ran = []
    monkeypatch.setattr(launch.script, "run", lambda task, path: ran.append(path) or 0)
    monkeypatch.setattr(launch.uvloop, "run", lambda main: main.close() or ExitCode.CRASH)
    assert launch.launch(Role.CHIEF, ["--job", str(path)]) == ExitCode.OK
    assert ran == [str(path)]


def parse_task(text: str) -> Task:
    role, index = text.split()
    return Task(Role(role), int(index))


def config_of(address: str) -> TaskConfig:
    return TaskConfig(role=Role.PS, job="job.py", ps=(address,))
