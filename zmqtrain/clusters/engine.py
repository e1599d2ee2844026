"""The interface of the engines on which submitted jobs run."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Self

from zmqtrain.clusters.plan import PERMANENT, SubmitPlan
from zmqtrain.clusters.programs import Write
from zmqtrain.clusters.submission import Submission
from zmqtrain.clusters.submitted import COMPLETED, FAILED, Submitted, log_of
from zmqtrain.config.cluster import Task
from zmqtrain.errors import ExitCode, NotRunningError, PeerLostError

Remedies = Mapping[str, str]
"""Advice to a user, by patterns of the reasons why a task does not run."""


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why the engine does not run ``what``: a task, or an object of the engine."""

    what: str
    text: str

    def with_remedies(self, remedies: Remedies) -> Reason:
        """Return this reason with the remedies whose patterns fit it."""
        fitting = (text for pattern, text in remedies.items() if re.search(pattern, self.text))
        return Reason(self.what, "; ".join((self.text, *fitting)))


@dataclass(frozen=True, slots=True)
class Engine(ABC):
    """An engine that starts the tasks of jobs.

    ``context``, ``namespace``: the place of jobs on it, as their records have it.
    """

    context: str
    namespace: str = ""

    has_our_paths: ClassVar[bool] = True
    """Whether tasks find files where this host has them, rather than in an image."""

    rotates_keys: ClassVar[bool] = True
    """Whether the keys of a job can change while it runs."""

    reads_our_keys: ClassVar[bool] = False
    """Whether tasks read the job's own directory of keys, so that nothing has to be sent."""

    logs_hold_all_lives: ClassVar[bool] = True
    """Whether a task's log includes the logs of its earlier lives."""

    keys_arrive_s: ClassVar[float] = 0.0
    """The time from :meth:`send_keys` until all tasks have the keys."""

    @classmethod
    @abstractmethod
    def chosen(cls, asked: Submission) -> Self:
        """Return the engine for a new job.

        Raises:
            ZmqTrainError: there is none.
        """

    @staticmethod
    @abstractmethod
    def rendered(plan: SubmitPlan) -> str:
        """Return the submission as text, without a request to the engine.

        Raises:
            ConfigError: the engine cannot run such a job.
        """

    @abstractmethod
    def check(self, plan: SubmitPlan, *, dry_run: bool) -> None:
        """Have the engine check a job, without submitting it.

        ``dry_run``: it will not be submitted either, so a lack of free nodes is an error, too.

        Raises:
            ZmqTrainError: the engine refuses it, or its name is taken.
        """

    @abstractmethod
    def submit(self, plan: SubmitPlan) -> str:
        """Submit a job that was checked, and return where it is.

        Raises:
            ZmqTrainError: something is in the way now; a part of the job may be there.
        """

    @abstractmethod
    def state(self, job: Submitted) -> str:
        """Return the state of the job on the engine, in a word or two."""

    @abstractmethod
    def outcome(self, job: Submitted) -> str:
        """Return the chief's record of the end of the job, "" if there is none.

        Its form is that of :mod:`zmqtrain.observe.outcome`.
        """

    @abstractmethod
    def reasons(self, job: Submitted) -> list[Reason]:
        """Return why tasks do not run."""

    @abstractmethod
    def located(self, job: Submitted) -> AbstractContextManager[str]:
        """Return the address at which ps 0 is reached, as long as the block runs.

        Raises:
            NotRunningError: ps 0 does not run.
            PeerLostError, RefusedError: it may run, but cannot be reached from here.
        """

    @abstractmethod
    def scale(self, job: Submitted, workers: int) -> None:
        """Change the number of workers, and check that the engine has changed it.

        Raises:
            ConfigError: this job's number cannot change.
            PeerLostError: the engine accepted the number, but did not change it.
        """

    def send_keys(self, job: Submitted) -> None:
        """Bring the job's secrets and registry to its tasks."""

    @abstractmethod
    def logs(
        self, job: Submitted, task: Task, out: Write, *, follow: bool, previous: bool = False
    ) -> None:
        """Pass on a task's log.

        ``follow``: and later lines, also those of later lives. ``previous``: the logs of earlier
        lives instead, on engines whose logs do not hold all lives.

        Raises:
            PeerLostError, NotRunningError: it has none yet.
        """

    @abstractmethod
    def remove(self, job: Submitted) -> None:
        """Remove all that the engine has of the job."""


def summary(job: Submitted, states: Mapping[Task, str]) -> str:
    """Return the state of a job from those of its tasks, each a word or an exit code."""
    end = states.get(job.concluding, "")
    if end.isdecimal() and int(end) in (0, *PERMANENT):
        return FAILED if int(end) else COMPLETED
    found = [f"ended with {state}" if state.isdecimal() else state for state in states.values()]
    return tally(found)


def tally(states: Sequence[str]) -> str:
    """Return the number of each state, such as ``1 pending, 3 running``."""
    return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))


def not_scaled(what: str, job: Submitted, workers: int) -> PeerLostError:
    """Return the error of an engine that accepted a number of workers without changing it."""
    return PeerLostError(
        f"the engine accepted {workers} workers, but {what}; expected {workers}; repeat zmqtrain "
        f"scale {job.name} --workers {workers}, or stop the job and submit it again: it goes on "
        "from its checkpoint"
    )


def not_running(task: Task, name: str) -> NotRunningError:
    return NotRunningError(f"{task} of {name} does not run")


def ended(job: Submitted, task: Task, code: str) -> Reason:
    """Return the reason of a task that ended with this exit code."""
    known = {each.value: f" ({each.name})" for each in ExitCode}
    text = f"ended with exit code {code}{known.get(int(code), '')}; see {log_of(job.name, task)}"
    return Reason(str(task), text)
