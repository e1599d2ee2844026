"""A submitted job on a Ray cluster, by Ray's own client; see ray_actors.py for what runs there."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import yaml

from zmqtrain.clusters.engine import Engine, Reason, ended, not_running, summary
from zmqtrain.clusters.plan import GRACE_S, SubmitPlan
from zmqtrain.clusters.programs import Write
from zmqtrain.clusters.ray_actors import PENDING, WAITS, RayJob, actor
from zmqtrain.clusters.submission import Submission
from zmqtrain.clusters.submitted import GONE, RUNNING, TAKEN, Submitted, TakenError
from zmqtrain.config.cluster import Task, parse_address
from zmqtrain.config.options import names_of
from zmqtrain.config.task import ENVIRON
from zmqtrain.errors import ConfigError, NotRunningError, PeerLostError

NAMESPACE = "zmqtrain"
AUTO = "auto"
"""Ray's name for the cluster of this host."""

ANSWER_S = 30.0
"""The longest time for a running actor to answer."""

CONNECT_S = 5.0
one_at_a_time = threading.RLock()
"""Ray connects a process to one cluster at a time, and zmqtrain jobs asks all of them."""

FOLLOW_S = 1.0
GIB = 1 << 30


class Ray(Engine):
    """A Ray cluster; an engine of jobs. ``context``: its address."""

    rotates_keys: ClassVar[bool] = False
    joined: ClassVar[str] = ""
    """The context of the cluster to which this process is connected."""

    @classmethod
    def chosen(cls, asked: Submission) -> Self:
        named = cls(asked.address or ENVIRON.get("RAY_ADDRESS") or AUTO)
        if named.context != AUTO:
            return named
        return cls(str(named._connected().get_runtime_context().gcs_address))

    @staticmethod
    def rendered(plan: SubmitPlan) -> str:
        tasks = {
            str(role): {
                "count": count,
                "num_cpus": plan.resources[role].cpu,
                "num_gpus": plan.resources[role].gpu,
                "memory": plan.resources[role].memory_nbytes,
                "variables": plan.environment(role, (), "its own keys", plan.logdir),
            }
            for role, count in plan.counts.items()
        }
        text: str = yaml.safe_dump({"name": plan.name, "actors": tasks}, sort_keys=False)
        return text

    def check(self, plan: SubmitPlan, *, dry_run: bool) -> None:
        if self._actor(plan.name) is not None:
            raise TakenError(f"Ray has an actor {plan.name}: {TAKEN}")

    def submit(self, plan: SubmitPlan) -> str:
        options = {"name": plan.name, "num_cpus": 0, "max_concurrency": 8}
        job_actor = actor(self._connected(), RayJob, options).remote(plan)
        self._answer_of(job_actor.states.remote())
        return f"Ray at {self.context}"

    def state(self, job: Submitted) -> str:
        with one_at_a_time:
            job_actor = self._actor(job.name)
            if job_actor is None:
                return GONE
            return summary(job, self._answer_of(job_actor.states.remote()))

    def outcome(self, job: Submitted) -> str:
        job_actor = self._actor(job.name)
        return "" if job_actor is None else str(self._answer_of(job_actor.outcome.remote()))

    def reasons(self, job: Submitted) -> list[Reason]:
        job_actor = self._actor(job.name)
        if job_actor is None:
            return [Reason(job.name, _gone(job.name))]
        free = self._connected().available_resources()
        left = ", ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        left += f", {free.get('memory', 0) / GIB:.1f} GiB"
        wanted = self._answer_of(job_actor.wanted.remote())
        found = []
        for task, state in self._answer_of(job_actor.states.remote()).items():
            if state.isdecimal() and int(state):
                found.append(ended(job, task, state))
            elif state == PENDING:
                asks = f"it asks for {wanted[task.role]}; free in the whole cluster are {left}"
                found.append(Reason(str(task), f"Ray has not started it: {asks}"))
            elif state not in (RUNNING, WAITS, "0"):
                found.append(Reason(str(task), state))
        return found

    @contextlib.contextmanager
    def located(self, job: Submitted) -> Iterator[str]:
        address = self._answer_of(self._present(job.name).address.remote())
        if not address:
            raise not_running(job.leader, job.name)
        yield address

    def scale(self, job: Submitted, workers: int) -> None:
        self._answer_of(self._present(job.name).scale.remote(workers), 2 * GRACE_S)

    def logs(
        self, job: Submitted, task: Task, out: Write, *, follow: bool, previous: bool = False
    ) -> None:
        job_actor, offset = self._present(job.name), 0
        while True:
            found = self._answer_of(job_actor.log.remote(task, offset))
            if found is None:
                raise PeerLostError(f"{task} of {job.name} has not started")
            text, offset, has_ended = found
            out(text)
            if not text and (has_ended or not follow):
                return
            time.sleep(0 if text else FOLLOW_S)

    def remove(self, job: Submitted) -> None:
        job_actor = self._actor(job.name)
        if job_actor is not None:
            try:
                self._answer_of(job_actor.end.remote(), 2 * GRACE_S)
            finally:
                self._connected().kill(job_actor)

    def _present(self, name: str) -> Any:
        job_actor = self._actor(name)
        if job_actor is None:
            raise NotRunningError(_gone(name))
        return job_actor

    def _actor(self, name: str) -> Any:
        """Return the actor of a job, None if Ray has none."""
        try:
            return self._connected().get_actor(name)
        except ValueError:
            return None

    def _connected(self) -> Any:
        """Return the module ray, connected to the cluster."""
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "ray is not installed; expected the version that the cluster has; install it, or "
                "zmqtrain[ray]"
            ) from None
        if ray.is_initialized():
            if self.context in (AUTO, Ray.joined):
                return ray
            ray.shutdown()
        try:
            if self.context != AUTO:  # to a closed port Ray would try for minutes
                at = parse_address(self.context.removeprefix("ray://"))
                socket.create_connection((at.host, at.port), CONNECT_S).close()
            ray.init(self.context, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as error:
            message = " ".join(str(error).split())[:400]
            raise PeerLostError(
                f"there is no Ray cluster at {self.context}, or one of another version of Ray or "
                "Python; expected the address that ray start has printed; give "
                f"{names_of('address')}, or set RAY_ADDRESS (ray: {message})"
            ) from None
        Ray.joined = self.context
        return ray

    def _answer_of(self, call: Any, timeout_s: float = ANSWER_S) -> Any:
        """Return the answer of an actor."""
        ray = self._connected()
        try:
            return ray.get(call, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise PeerLostError(
                f"Ray has not answered within {timeout_s:g} s; is the cluster full, or its head "
                "down? try ray status"
            ) from None
        except ray.exceptions.RayError as failure:
            moves = isinstance(failure, ray.exceptions.RayActorError)
            raise actor_error(" ".join(str(failure).split())[-400:], moves=moves) from None


def actor_error(message: str, *, moves: bool) -> PeerLostError:
    """Return the error of the job's actor for a message of Ray.

    ``moves``: Ray has lost the actor. Unless it failed as it was made, Ray starts it elsewhere.
    """
    if moves and "creation task" not in message:
        advice = "Ray starts it again, as after the loss of its node; try again in a minute"
    else:
        advice = "expected this version of zmqtrain on every node"
    return PeerLostError(f"the job's actor does not answer; {advice} (ray: {message})")


def _gone(name: str) -> str:
    return (
        f"Ray has no actor of {name}: its cluster was restarted, or the job removed; stop it, and "
        "submit it again: it goes on from its checkpoint"
    )
