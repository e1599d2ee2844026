"""A stand-in for the module ray, whose actors of tasks do as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from zmqtrain.clusters.submitted import RUNNING


class RayError(Exception):
    """Base of Ray's errors."""


class RayActorError(RayError):
    """An actor is gone."""


class GetTimeoutError(RayError, TimeoutError):
    """An answer is not there in time."""


class Task:
    """The actor of a task. What fails by ``broken`` raises, and ``silent`` answers nothing."""

    def __init__(self, plan: Any, task: Any) -> None:
        self.task, self.state, self.written = task, RUNNING, b""
        self.broken: set[str] = set()
        self.silent: set[str] = set()
        self.is_ended = self.is_killed = False

    def tend(self, addresses: Sequence[str]) -> tuple[str, str]:
        return self.state, "127.0.0.1:1"

    def log(self, offset: int) -> bytes:
        return self.written[offset : offset + 100]

    def tail(self) -> tuple[int, bytes]:
        begin = max(0, len(self.written) - 100)
        return begin, self.written[begin:]

    def outcome(self) -> str:
        return "how it ended"

    def end(self) -> None:
        self.is_ended = True


class Ray:
    """The module. ``tasks``: the actors so far, by the task's name."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayActorError=RayActorError, GetTimeoutError=GetTimeoutError
    )
    util = SimpleNamespace(list_named_actors=list)

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.failures: list[Exception] = []  # of the next calls of wait

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._make))

    def get(self, call: Callable[[], Any] | None, timeout: float | None = None) -> Any:
        if call is None:
            raise GetTimeoutError("no answer")
        return call()

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], Any]:
        if self.failures:
            raise self.failures.pop()
        return [call for call in calls if call is not None], []

    def kill(self, actor: Any) -> None:
        actor.of.is_killed = True

    def _make(self, plan: Any, task: Any) -> Any:
        made = self.tasks[str(task)] = Task(plan, task)
        names = ("tend", "log", "tail", "outcome", "end")
        calls = {name: SimpleNamespace(remote=partial(_begun, made, name)) for name in names}
        return SimpleNamespace(of=made, **calls)


def _begun(task: Task, name: str, *arguments: Any) -> Callable[[], Any] | None:
    """Return what will be the answer to a call, None if there will be none."""
    if name in task.silent:
        return None
    if name in task.broken:
        return partial(_fail, RayActorError(f"{task.task} is gone"))
    return partial(getattr(task, name), *arguments)


def _fail(error: Exception) -> Any:
    raise error
