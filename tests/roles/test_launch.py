"""Start of a role's process, and scripts that go on after their task."""

from __future__ import annotations

import errno
import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from signal import SIGTERM

import click
import psutil
import pytest
from threadpoolctl import threadpool_info

import zmqtrain
from tests.harness import Stage
from zmqtrain.compute.threads import limit_threads, thread_limit
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.commands import invoke
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ExitCode, RunFailedError
from zmqtrain.observe.outcome import FILE, outcome_in
from zmqtrain.planning.plan import Plan
from zmqtrain.roles import launch

TF_CONFIG = json.dumps(
    {
        "cluster": {"ps": ["a:2222", "b:2222"], "worker": ["c:2222"]},
        "task": {"type": "ps", "index": 1},
    }
)


def no_directory() -> int:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")


def test_host_without_a_writable_directory_is_a_mistake_with_its_remedy(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a container with a read-only root and no tmpfs, wherever Python first needs one."""
    assert launch.exit_code_of(no_directory) == ExitCode.USAGE
    assert invoke(click.Command("command", callback=no_directory), "command", []) == ExitCode.USAGE
    for told in (caplog.text, capsys.readouterr().err):
        assert "set TMPDIR to a directory" in told and "Traceback" not in told


@pytest.mark.parametrize("words", [("zmqtrain.roles.worker", "--job"), ("zmqtrain", "run")])
def test_first_process_of_a_container_heeds_sigterm_while_it_loads_the_job(
    words: tuple[str, ...], stage: Stage
) -> None:
    job, loads = stage.directory / "job.py", stage.directory / "loads"
    job.write_text(f"import time\nopen({str(loads)!r}, 'w')\ntime.sleep(3600)\n")
    unshare = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    if not shutil.which("unshare") or subprocess.call([*unshare, "true"]):
        pytest.skip("needs a PID namespace")
    process = stage.start("unshare", *unshare, sys.executable, "-m", *words, job)
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
    arguments: list[str], environ: dict[str, str], started: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = []

    async def note(config: TaskConfig, plan: Plan, on_start: object) -> int:
        tasks.append(config.task)
        return 0

    monkeypatch.setattr(launch, "serve", note)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert launch.launch(None, ["--job", "examples/digits.py", *arguments]) == 0
    assert tasks == [started]


def test_task_without_a_role_is_refused_with_the_options_for_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch.launch(None, ["--job", "examples/digits.py"]) == ExitCode.USAGE
    assert "--role (or ZMQTRAIN_ROLE)" in capsys.readouterr().err


@pytest.mark.parametrize("ps", ["127.0.0.1:2222", "ipc:///of/zmqtrain/run.sock"])
def test_mistyped_variable_is_reported_once(
    ps: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZMQTRAIN_WORKER", "3")
    arguments = ["--job", "nowhere.py", "--ps", ps, "--workers", "1"]
    assert launch.launch(Role.PS, arguments) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert ("ZMQTRAIN_WORKER is set" in told) == (not ps.startswith("ipc:"))


def test_cluster_that_contradicts_the_strategy_is_reported_before_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--job", "nowhere.py", "--workers", "3", "--strategy", "mirrored"]
    assert launch.launch(Role.WORKER, arguments) == ExitCode.USAGE
    assert "TF_CONFIG gives 3; expected 1" in capsys.readouterr().err


TRAINER = """import zmqtrain as z
model = z.models.LinearRegression()
parts = {"model": model, "data": z.data.NoisyLine(), "optimizer": z.optim.SGD()}
"""
JOB = "raise KeyError('DATA_DIR')"
ENDS = {
    "job": (JOB, Role.CHIEF, 2, "line 1: KeyError: 'DATA_DIR'"),
    "job in a ps": (JOB, Role.PS, 2, ""),
    "own loop": (f"{TRAINER}job = z.Job(**parts, own_loop=True)", Role.WORKER, 2, "did not call"),
    "polcy": (f"{TRAINER}z.Trainer(model, polcy=1).fit(0)", Role.WORKER, 2, "no option 'polcy'"),
    "raises": (f"{TRAINER}1 / 0\nz.Trainer(model)", Role.CHIEF, 1, "line 4: ZeroDivisionError"),
    "exits": (f"{TRAINER}exit(3)\nz.Trainer(model)", Role.CHIEF, 3, "ended by sys.exit(3)"),
}


@pytest.mark.parametrize(("text", "role", "code", "told"), ENDS.values(), ids=ENDS)
def test_mistake_in_the_file_is_recorded_as_the_end_of_the_job(
    text: str, role: Role, code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ended = tmp_path / "job.py", tmp_path / "ended.json"
    path.write_text(text)
    monkeypatch.setenv("ZMQTRAIN_ROLE", role)  # as engines do
    arguments = ["--job", str(path), "--ended-file", str(ended)]
    if role is Role.WORKER:
        arguments += ["--ps", "0", "--workers", "1"]
    assert launch.launch(role, arguments) == code
    outcome = outcome_in(ended.read_text()) if ended.exists() else None
    assert (outcome is not None) == bool(told)
    assert outcome is None or (told in outcome.ended and outcome.exit_code == code)


def test_outcome_stays_while_a_chief_that_has_come_back_waits(stage: Stage) -> None:
    ended = stage.directory / "ended.json"
    ended.write_text("as before")
    cluster = ["--ps", f"127.0.0.1:{stage.free_ports(1)[0]}", "--workers", "1"]
    job = str(Path("examples/digits.py").resolve())
    given = ["--job", job, "--ended-file", str(ended), *cluster]
    chief = stage.role("chief", *given, "--metrics-port", "0")
    chief.until_line("waiting for 1 ps")
    chief.signal(SIGTERM)
    assert chief.exit_code() == ExitCode.TERMINATED
    assert ended.read_text() == "as before"


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
    assert launch.launch(Role.CHIEF, ["--job", str(path)]) == ExitCode.OK
    assert ran == [str(path)]


@pytest.mark.parametrize(
    ("behind", "code"),
    [("1 / 0", 1), ("exit(3)", 3), ("exit('no')", 1), ("exit(255)", 255), ("exit(-1)", 255)],
)
def test_script_that_fails_after_fit_is_recorded_in_the_logdir(
    behind: str, code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fit.py"
    path.write_text(f"{TRAINER}z.Trainer(model, z.optim.SGD()).fit(z.data.NoisyLine())\n{behind}")
    with pytest.raises(RunFailedError) as raised:
        launch.script.run_fit(zmqtrain.run, str(path), {"logdir": str(tmp_path)})
    outcome = outcome_in((tmp_path / FILE).read_text())
    assert outcome is not None
    assert (outcome.exit_code, raised.value.exit_code) == (code, code)
    assert (outcome.step, outcome.train_loss is None) == (32, False)
    assert "ZeroDivisionError" in outcome.ended or "exit(" in outcome.ended
    assert ("line 5, in <module>" in caplog.text) == (behind == "1 / 0")
    assert "runpy" not in caplog.text  # nor another frame before that of the script


def test_process_is_as_before_after_a_task() -> None:
    before = gc.get_threshold(), thread_limit(), [one["num_threads"] for one in threadpool_info()]
    with launch.script.process_restored():
        limit_threads(1)
        gc.freeze()
        gc.set_threshold(20_000)
    threads = [one["num_threads"] for one in threadpool_info()]
    assert (gc.get_threshold(), thread_limit(), threads) == before
    assert gc.get_freeze_count() == 0
