"""The actor of a whole job on Ray: what it keeps, and that it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clusters import ray_stand_in
from tests.clusters.examples import example_plan
from tests.constants import Constants
from tests.harness import until
from tests.modules import Modules
from zmqtrain.clusters import ray as ray_engine
from zmqtrain.clusters import ray_actors
from zmqtrain.clusters.ray_actors import RayJob
from zmqtrain.clusters.submitted import RUNNING, Submitted
from zmqtrain.config.cluster import Role, Task

WORKER, CHIEF = Task(Role.WORKER, 0), Task(Role.CHIEF, 0)


@pytest.fixture
def ray(modules: Modules, constants: Constants) -> ray_stand_in.Ray:
    made = ray_stand_in.Ray()
    modules("ray", made)
    constants(ray_actors, TEND_S=0.002)
    constants(ray_engine, FOLLOW_S=0.002)
    return made


@pytest.fixture
def job(ray: ray_stand_in.Ray) -> Iterator[RayJob]:
    job = RayJob(replace(example_plan(), ps=1, workers=1, keys={}))
    eventually(lambda: set(job.states().values()) == {RUNNING})
    yield job
    job.end()


def eventually(condition: Callable[[], Any]) -> None:
    until(condition, "what the job does next", str)


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch, ray: ray_stand_in.Ray, job: RayJob) -> Any:
    """Follow the log of the worker; return what was written."""
    engine = ray_engine.Ray("auto")
    remote = SimpleNamespace(remote=lambda *given: lambda: job.log(*given))
    actor = SimpleNamespace(log=remote)
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    ray.get_actor = lambda name: actor  # type: ignore[attr-defined]

    def followed(on_part: Callable[[], None]) -> bytes:
        found: list[bytes] = []

        def write(part: bytes) -> None:
            found.append(part)
            on_part()

        submitted = Submitted("digits", "ray", "job.py", 1, 1, 1, "keys")
        engine.logs(submitted, WORKER, write, follow=True)
        return b"".join(found)

    return followed


def test_followed_log_comes_to_its_end_with_the_job(
    ray: ray_stand_in.Ray, job: RayJob, follow: Any
) -> None:
    """Of a long log only the last part is kept."""
    ray.tasks["worker 0"].written = text = bytes(range(250))
    parts = 0

    def on_part() -> None:
        nonlocal parts
        parts += 1
        if parts == 2:  # 200 bytes have been written
            ray.tasks["chief 0"].state = "0"
            eventually(lambda: ray.tasks["worker 0"].is_killed)

    assert follow(on_part) == text


def test_followed_log_ends_with_its_task(ray: ray_stand_in.Ray, job: RayJob, follow: Any) -> None:
    task = ray.tasks["worker 0"]
    task.written, task.state = b"no such file", "2"
    eventually(lambda: job.states()[WORKER] == "2")
    assert follow(lambda: None) == b"no such file"


@pytest.mark.parametrize("failure", ["broken", "silent"])
def test_job_is_concluded_although_a_task_is_lost(
    ray: ray_stand_in.Ray, job: RayJob, failure: str
) -> None:
    getattr(ray.tasks["worker 0"], failure).update({"tail", "end"})
    ray.tasks["chief 0"].written, ray.tasks["chief 0"].state = b"step 10", "0"
    eventually(lambda: all(task.is_killed for task in ray.tasks.values()))
    assert job.log(CHIEF, 0) == (b"step 10", 7, True)
    assert job.log(WORKER, 0) == (b"", 0, True)
    assert job.outcome() == "how it ended"


def test_job_is_tended_although_a_poll_has_failed(
    ray: ray_stand_in.Ray, job: RayJob, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    ray.failures.append(ray_stand_in.RayError("the head is restarted"))
    eventually(lambda: not ray.failures)
    ray.tasks["worker 0"].state = "77"
    eventually(lambda: job.states()[WORKER] == "77")
    assert "could not tend digits; trying again" in caplog.text
