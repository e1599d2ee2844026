"""A job's tasks on Ray, and `zmqtrain submit --on ray` without Ray."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from tests.clusters.conftest import Kubectl
from tests.clusters.examples import JOB, ROOT, example_plan
from tests.harness import until
from tests.modules import Modules
from zmqtrain.cli.main import main
from zmqtrain.clusters import ray as ray_engine
from zmqtrain.clusters.ray_actors import WAITS, RayTask
from zmqtrain.clusters.submitted import RUNNING, Submitted, submitted_jobs
from zmqtrain.config.cluster import Role, Task
from zmqtrain.errors import ExitCode
from zmqtrain.local.run_directories import run_directories

SUBMIT = ("submit", str(ROOT / JOB), "--on", "ray", "--ps-memory", "1Gi")
ABSENT = ("127.0.0.1:1",)  # nobody listens there, so a task waits


@pytest.fixture
def own_tasks() -> Callable[[], set[psutil.Process]]:
    """Return the processes that this one has started since; other tests may have left some."""
    before = psutil.Process().children()
    return lambda: set(psutil.Process().children()).difference(before)


@pytest.fixture
def task_actor(tempdir: Path, request: pytest.FixtureRequest) -> Iterator[RayTask]:
    job = getattr(request, "param", str(ROOT / JOB))
    plan = replace(example_plan(), job=job, ps=1, logdir=None, keys={"registry": "a"})
    plan = replace(plan, working=str(tempdir))
    task_actor = RayTask(plan, Task(Role.WORKER, 0))
    yield task_actor
    task_actor.end()
    assert not list(tempdir.iterdir())


@pytest.mark.parametrize(
    ("said", "moves", "advice"),
    [
        ("The actor is temporarily unavailable", True, "try again in a minute"),
        ("The actor died because its node has died", True, "try again in a minute"),
        ("The actor died because of an error raised in its creation task", True, "this version"),
        ("ModuleNotFoundError: No module named 'zmqtrain'", False, "this version"),
    ],
)
def test_actor_that_does_not_answer_is_explained(said: str, moves: bool, advice: str) -> None:
    text = str(ray_engine.actor_error(said, moves=moves))
    assert advice in text and said in text
    assert ("try again" in text) != ("this version" in text)


def test_task_waits_until_the_ps_are_known(task_actor: RayTask, tmp_path: Path) -> None:
    assert task_actor.tend(()) == (WAITS, "")
    (directory,) = tmp_path.iterdir()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory, directory / "registry")]
    assert modes == [0o700, 0o600]
    (known,) = run_directories(tmp_path)  # so zmqtrain clean removes it once its actor is gone
    assert (known.path, known.in_use) == (directory, True)
    assert task_actor.log(0) == b""


@pytest.mark.parametrize("task_actor", ["nowhere.py"], indirect=True)
def test_task_that_ends_for_good_is_not_started_again(task_actor: RayTask) -> None:
    def code() -> str:
        state, _ = task_actor.tend(ABSENT)
        return "" if state == RUNNING else state

    assert until(code, "the end", lambda: str(task_actor.log(0))) == str(int(ExitCode.USAGE))
    assert task_actor.tend(ABSENT)[0] == str(int(ExitCode.USAGE))
    assert b"nowhere.py" in task_actor.log(0)


def test_task_is_started_again_when_its_supervisor_is_killed_or_the_ps_have_moved(
    own_tasks: Callable[[], set[psutil.Process]], task_actor: RayTask
) -> None:
    def next_life() -> set[psutil.Process]:
        assert task_actor.tend(ABSENT)[0] == RUNNING
        return own_tasks() - {first}

    assert task_actor.tend(ABSENT)[0] == RUNNING
    (first,) = own_tasks()
    first.kill()
    (second,) = until(next_life, "another life", lambda: str(task_actor.log(0)))
    task_actor.tend(("127.0.0.1:2",))
    (third,) = own_tasks()
    assert third != second


def test_missing_ray_is_reported_with_its_extra(
    kubectl: Kubectl, modules: Modules, capsys: pytest.CaptureFixture[str]
) -> None:
    modules("ray", None)
    assert main([*SUBMIT]) == ExitCode.USAGE
    assert "zmqtrain[ray]" in capsys.readouterr().err
    assert not submitted_jobs()


@pytest.mark.parametrize(
    "address, code", [("127.0.0.1:1", ExitCode.PEER_LOST), ("head", ExitCode.USAGE)]
)
def test_address_without_a_cluster_is_reported(
    kubectl: Kubectl, modules: Modules, capsys: pytest.CaptureFixture[str], address: str, code: int
) -> None:
    modules("ray", SimpleNamespace(is_initialized=lambda: False))
    assert main([*SUBMIT, "--address", address]) == code
    assert address in capsys.readouterr().err
    assert not submitted_jobs()


class OneCluster:
    """A stand-in for the module ray: as Ray, it is connected to one cluster at a time."""

    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, RayError=RuntimeError)

    def __init__(self, states: dict[str, str]) -> None:
        """``states``: how the chief is of the only job of each cluster, by its address."""
        self._states, self._at = states, ""

    def is_initialized(self) -> bool:
        return bool(self._at)

    def init(self, address: str, **_: object) -> None:
        assert not self._at
        self._at = address

    def shutdown(self) -> None:
        self._at = ""

    def get_actor(self, name: str) -> SimpleNamespace:
        with ThreadPoolExecutor() as other:  # which must not connect to another cluster meanwhile
            assert not other.submit(ray_engine.one_at_a_time.acquire, blocking=False).result()
        return SimpleNamespace(states=SimpleNamespace(remote=lambda: self._at))

    def get(self, asked_at: str, timeout: float) -> dict[Task, str]:
        assert asked_at == self._at
        return {Task(Role.CHIEF, 0): self._states[self._at]}


@pytest.mark.usefixtures("kubectl")
def test_each_job_is_asked_for_on_its_own_cluster(
    modules: Modules, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        one, other = (f"127.0.0.1:{port.getsockname()[1]}" for port in ports)
        for name, address in [("a", one), ("b", other), ("c", one), ("d", other)]:
            Submitted(name, "ray", "job.py", 1, 1, 1, "keys", context=address).save()
        ray = OneCluster({one: "0", other: "77"})
        modules("ray", ray)
        assert main(["jobs", "--json"]) == ExitCode.OK
    rows = json.loads(capsys.readouterr().out)["jobs"]
    states = {row["name"]: row["state"] for row in rows}
    assert states == {"a": "completed", "b": "failed", "c": "completed", "d": "failed"}


def test_print_writes_actors_without_keys_and_asks_nobody(
    kubectl: Kubectl, modules: Modules, capsys: pytest.CaptureFixture[str]
) -> None:
    modules("ray", None)
    assert main([*SUBMIT, "--gpu", "2", "--print"]) == ExitCode.OK
    actors = yaml.safe_load(capsys.readouterr().out)["actors"]
    assert {role: actor["num_gpus"] for role, actor in actors.items()} == {
        "ps": 0,
        "chief": 0,
        "worker": 2,
    }
