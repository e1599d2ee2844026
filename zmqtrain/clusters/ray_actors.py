"""The actors of a job on a Ray cluster: one for each task, and one for the whole job.

Ray places the actors, and restarts them elsewhere when a node is lost. A task may then have another
address, so the job's actor polls those of the tasks, and sends the addresses of the ps to all of
them; an actor restarts its task when these change. Both are plain classes that :func:`actor` makes
actors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zmqtrain.clusters.plan import GRACE_S, SubmitPlan, keys_of
from zmqtrain.clusters.submitted import RUNNING
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.options import variable_of
from zmqtrain.config.task import ENVIRON
from zmqtrain.local.run_directories import run_directory
from zmqtrain.local.supervisor import dying_with
from zmqtrain.observe.outcome import FILE

log = logging.getLogger(__name__)

TEND_S = 0.5
ANSWER_S = 2.0
"""Seconds that the job's actor waits for that of a task, which answers at once if it runs."""

LOG_NBYTES = 1 << 20
"""The size of a log that is kept after the end of its job, and of the largest answer."""

WAITS, PENDING = "waiting for the ps", "pending"


class RayTask:
    """Runs one task, under its supervisor, where Ray has placed this actor."""

    def __init__(self, plan: SubmitPlan, task: Task) -> None:
        """``plan`` has no other keys than this task's."""
        self._plan, self._task = plan, task
        self._held = contextlib.ExitStack()  # zmqtrain clean removes files without a holder
        self._directory = self._held.enter_context(run_directory())
        for name, text in plan.keys.items():
            descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
        self._address = ""
        if task in plan.leaders:
            import ray

            with socket.socket() as free:
                free.bind(("", 0))
                self._address = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
        self._known_addresses: Sequence[str] = ()
        self._process: subprocess.Popen[bytes] | None = None

    def tend(self, addresses: Sequence[str]) -> tuple[str, str]:
        """Have the task run; return its state, or its exit code, and where it listens.

        ``addresses``: those of all tasks that listen; empty until they are known.
        """
        if addresses != self._known_addresses:
            self._kill()
            self._known_addresses = addresses
            if addresses:
                self._start()
        if self._process is None:
            return WAITS, self._address
        code = self._process.poll()
        if code is not None and code < 0:  # the supervisor was killed, and its task with it
            self._start()
            code = None
        return RUNNING if code is None else str(code), self._address

    def log(self, offset: int) -> bytes:
        """Return a part of the task's log."""
        path = self._directory / "log"
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(LOG_NBYTES)

    def tail(self) -> tuple[int, bytes]:
        """Return the last part of the task's log, and where it begins."""
        path = self._directory / "log"
        offset = max(0, path.stat().st_size - LOG_NBYTES) if path.exists() else 0
        return offset, self.log(offset)

    def outcome(self) -> str:
        """Return the task's record of the end of the job, "" if there is none."""
        with contextlib.suppress(OSError):
            return (self._directory / FILE).read_text()
        return ""

    def end(self) -> None:
        """Stop the task gracefully, and remove its directory."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        self._kill()
        self._held.close()

    def _start(self) -> None:
        plan, role = self._plan, self._task.role
        own, known = str(self._directory), self._known_addresses
        variables = plan.environment(role, known, own, plan.logdir)
        variables[variable_of("ended_file")] = str(self._directory / FILE)
        command = replace(plan, python=sys.executable).command(role)
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--index", str(self._task.index)],
                env={**ENVIRON, **variables},
                cwd=plan.working,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=dying_with(signal.SIGKILL),
            )

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class RayJob:
    """Has an actor for each task of a job; runs on a node of Ray, and outlives the submission."""

    def __init__(self, plan: SubmitPlan) -> None:
        import ray

        self._ray, self._plan = ray, plan
        named, prefix = ray.util.list_named_actors(), f"{plan.name}-{Role.WORKER}-"
        held = [name for name in named if name.startswith(prefix)]
        self._workers = len(held) or plan.workers  # there are some if this is another life
        self._actors: dict[Task, Any] = {}
        self._calls: dict[Task, Any] = {}
        self._states: dict[Task, str] = {}
        self._addresses: dict[Task, str] = {}
        # Kept once the job is done: the last part of each log, and where it begins.
        self._logs: dict[Task, tuple[int, bytes]] = {}
        self._outcome = ""
        self._is_over = False
        self._lock = threading.Lock()  # one thread tends, others answer
        threading.Thread(target=self._run, daemon=True).start()

    def states(self) -> dict[Task, str]:
        """Return the state of each task, or its exit code."""
        return {task: self._states.get(task, PENDING) for task in self._tasks()}

    def wanted(self) -> dict[Role, str]:
        """Return the resources that a task of each role asks Ray for."""
        return {
            role: f"{each.cpu:g} CPU, {each.gpu:g} GPU, {each.memory_nbytes / (1 << 30):.1f} GiB"
            for role, each in self._plan.resources.items()
        }

    def address(self) -> str:
        """Return where ps 0 listens, "" if it does not run."""
        leader = self._plan.leader
        return self._addresses.get(leader, "") if self._states.get(leader) == RUNNING else ""

    def log(self, task: Task, offset: int) -> tuple[bytes, int, bool] | None:
        """Return a part of a task's log, the offset of the next part, and whether the task has
        ended; None if it has not been placed."""
        if task in self._logs:
            begin, kept = self._logs[task]
            return kept[max(0, offset - begin) :], max(offset, begin + len(kept)), True
        state = self._states.get(task, PENDING)  # before the log, which grows until the end
        if task not in self._actors or state == PENDING:
            return None
        text: bytes = self._ray.get(self._actors[task].log.remote(offset), timeout=GRACE_S)
        return text, offset + len(text), state.isdecimal()

    def outcome(self) -> str:
        """Return the chief's record of the end of the job, "" if there is none."""
        task = self._plan.concluding
        if self._outcome or task not in self._actors or self._states.get(task) == PENDING:
            return self._outcome
        text: str = self._ray.get(self._actors[task].outcome.remote(), timeout=GRACE_S)
        return text

    def scale(self, workers: int) -> None:
        with self._lock:
            self._workers = workers
            self._end([task for task in self._actors if task not in self._tasks()])

    def end(self) -> None:
        """End all tasks."""
        with self._lock:
            self._workers = 0
            self._end(list(self._actors))

    def _tasks(self) -> list[Task]:
        return replace(self._plan, workers=self._workers).tasks

    def _run(self) -> None:
        while self._workers and not self._is_over:
            with self._lock:
                try:
                    if self._states.get(self._plan.concluding) == "0":
                        self._conclude()
                    elif self._workers:
                        self._tend()
                except Exception:  # nobody else would see it, nor tend the job
                    log.exception("could not tend %s; trying again", self._plan.name)
            time.sleep(TEND_S)

    def _tend(self) -> None:
        """Poll the state of every task, and send its actor the addresses of the ps."""
        known = [self._addresses.get(leader, "") for leader in self._plan.leaders]
        addresses = tuple(known) if all(known) else ()
        for task in self._tasks():
            if task not in self._actors:
                self._actors[task] = self._task_actor(task)
            if task not in self._calls:
                self._calls[task] = self._actors[task].tend.remote(addresses)
        calls = list(self._calls.values())
        done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=ANSWER_S)
        for task, call in list(self._calls.items()):
            if call not in done:
                self._states[task] = PENDING
                continue
            del self._calls[task]
            try:
                self._states[task], self._addresses[task] = self._ray.get(call)
            except self._ray.exceptions.RayActorError:
                self._states[task] = PENDING  # its node is gone: Ray starts it again elsewhere
            except self._ray.exceptions.RayError as error:
                self._states[task] = f"cannot be started: {str(error).splitlines()[-1]}"

    def _task_actor(self, task: Task) -> Any:
        plan, wanted = self._plan, self._plan.resources[task.role]
        options: dict[str, Any] = {
            "name": f"{plan.name}-{task.hyphenated}",
            "num_cpus": wanted.cpu,
            "num_gpus": wanted.gpu,
            "memory": wanted.memory_nbytes or None,
            "scheduling_strategy": "SPREAD",
            "get_if_exists": True,
        }
        own = replace(plan, keys=keys_of(plan.keys, task))
        return actor(self._ray, RayTask, options).remote(own, task)

    def _conclude(self) -> None:
        """Keep the logs of a job that is done, and give its resources back.

        Tasks that Ray has lost, or that do not answer, keep nothing from ending.
        """
        if not self._logs:
            self._keep()
        self._end(list(self._actors))
        self._is_over = True

    def _keep(self) -> None:
        placed = [task for task in self._actors if self._states.get(task) != PENDING]
        calls = {task: self._actors[task].tail.remote() for task in placed}
        of_chief = self._actors[self._plan.concluding].outcome.remote()
        asked = [*calls.values(), of_chief]
        self._ray.wait(asked, num_returns=len(asked), timeout=GRACE_S)
        self._outcome = self._answer(of_chief, "")
        self._logs = {task: self._answer(call, (0, b"")) for task, call in calls.items()}

    def _answer(self, call: Any, lost: Any) -> Any:
        """Return the answer to a call if it is there by now, ``lost`` otherwise."""
        try:
            return self._ray.get(call, timeout=0)
        except self._ray.exceptions.RayError as error:
            log.warning("a part of what %s leaves is lost: %s", self._plan.name, error)
            return lost

    def _end(self, tasks: Sequence[Task]) -> None:
        """Stop those of these tasks that run gracefully, and remove their actors."""
        there = [task for task in tasks if self._states.get(task, PENDING) != PENDING]
        ends = [self._actors[task].end.remote() for task in there]
        self._ray.wait(ends, num_returns=len(ends), timeout=GRACE_S) if ends else None
        for task in tasks:
            self._ray.kill(self._actors.pop(task))
            self._calls.pop(task, None)


def actor(ray: Any, kind: type, options: Mapping[str, Any]) -> Any:
    """Return a class as an actor that outlives its creator, and any node."""
    usual = {"lifetime": "detached", "max_restarts": -1, "max_task_retries": 0}
    return ray.remote(kind).options(**usual | dict(options))
