"""Kills and pauses of a running job's tasks, on a schedule that depends on a seed.

The schedule is pure. :class:`Chaos` carries it out on the tasks of this host, which it finds in the
job's status, and records the time until each task is back.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from zmqtrain.config.cluster import Role
from zmqtrain.errors import ConfigError, PeerLostError, ZmqTrainError
from zmqtrain.protocol.status import Status, TaskStatus

POLL_S = 0.1
LATE_S = 0.5  # a longer silence of the job does not count in the time of the schedule
MAX_ACTS = 1_000_000  # all are planned before the first is carried out

JITTER = 0.2  # of an interval, longer or shorter
ROLES = ("ps", "worker", "chief")
_ABSENT = ("silent", "left")
_ENDED = "the task was already dead, and is not counted: its last process {} has ended"

Kind = Literal["kill", "pause"]


@dataclass(frozen=True, slots=True)
class Act:
    """A kill or a pause of one task."""

    at_s: float  # from the beginning
    kind: Kind
    role: str
    index: int
    lasts_s: float = 0.0  # length of a pause

    @property
    def task(self) -> str:
        return f"{self.role} {self.index}"


def schedule(
    seed: int,
    seconds: float,
    tasks: Mapping[str, int],
    kill: Mapping[str, float],
    pause: Mapping[str, float],
    pause_s: float,
) -> list[Act]:
    """Return the acts within ``seconds``, in order of time.

    ``tasks``: number of tasks of each role. ``kill``, ``pause``: for a role, the seconds between
    two such acts on one of its tasks, plus or minus a fifth.

    Raises:
        ConfigError: the schedule has more acts than :data:`MAX_ACTS`.
    """
    acts = []
    plans: list[tuple[Kind, Mapping[str, float]]] = [("kill", kill), ("pause", pause)]
    for kind, intervals in plans:
        for role, every_s in sorted(intervals.items()):
            if seconds > MAX_ACTS * every_s:
                raise ConfigError(
                    f"a {kind} of a {role} every {every_s:g} s for {seconds:g} s makes more than "
                    f"{MAX_ACTS} {kind}s; give a longer interval or a shorter --seconds"
                )
            chance = random.Random(f"{seed} {kind} {role}")
            at_s = every_s
            while at_s < seconds and tasks.get(role, 0):
                index = chance.randrange(tasks[role])
                lasts_s = pause_s if kind == "pause" else 0.0
                acts.append(Act(at_s, kind, role, index, lasts_s))
                at_s += every_s * (1 + chance.uniform(-JITTER, JITTER))
    return sorted(acts, key=lambda act: act.at_s)


@dataclass(slots=True)
class CarriedOut:
    """An act that was carried out."""

    act: Act
    process: str  # host:pid of the task then
    at: float  # of the monotonic clock
    back_s: float | None = None  # how long it took until the task was back


@dataclass(slots=True)
class Report:
    """The result of a schedule."""

    seed: int
    planned: int = 0  # number of acts of the schedule
    done: list[CarriedOut] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # acts that were not carried out, and why
    steps: int = 0  # made by the job meanwhile
    longest_silence_s: float = 0.0  # longest time for the job to answer
    ended: str = ""  # why the job ended, "" if it goes on
    silent: str = ""  # the error if the job no longer answers, else ""

    def lost(self) -> list[CarriedOut]:
        """Return the acts whose tasks never came back."""
        is_gone = self.ended or self.silent
        return [done for done in self.done if done.back_s is None and not is_gone]


class Chaos:
    """Carries out a schedule on one job."""

    def __init__(
        self,
        ask: Callable[[], Status],
        show: Callable[[str], None],
        back_s: float = 60.0,
        spent: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """``ask`` returns the job's status, or raises a ZmqTrainError if it does not answer.

        ``show`` is called with a line for each act. ``back_s``: longest time for a task to be
        back, and for the job to answer. ``spent`` returns the tasks that have no restart left,
        each with the Unix time until which it has none.
        """
        self._ask, self._show, self._spent = ask, show, spent
        self._back_s = back_s
        self._paused: list[tuple[float, int]] = []  # (end of the pause, pid)
        self._late_s = 0.0  # how long the schedule has stood still

    def run(self, seed: int, acts: Sequence[Act], seconds: float) -> Report:
        """Carry out the acts, then wait until all tasks are back, or the job is gone.

        Raises:
            PeerLostError: the job did not answer even before the first act.
        """
        report = Report(seed, len(acts))
        first = self._status(report)
        began, pending, self._late_s = time.monotonic(), list(acts), 0.0
        try:
            while not report.ended:
                now = time.monotonic()
                self._resume(now)
                status = self._status(report)
                self._note_returns(report, status)
                passed_s = now - began - self._late_s
                report.steps = status.step - first.step
                report.ended = status.stop or status.failure
                while pending and passed_s >= pending[0].at_s and not report.ended:
                    self._do(pending.pop(0), status, report, began)
                if passed_s >= seconds and not pending and self._is_settled(report, now):
                    break
                time.sleep(POLL_S)
        except PeerLostError as error:
            report.silent = str(error)
        finally:
            self._resume(float("inf"))
        return report

    def _is_settled(self, report: Report, now: float) -> bool:
        is_over = [d.back_s is not None or now - d.at >= self._back_s for d in report.done]
        return all(is_over) and not self._paused

    def _status(self, report: Report) -> Status:
        began = time.monotonic()
        while True:
            try:
                status = self._ask()
            except ZmqTrainError as error:
                self._resume(time.monotonic())
                silent_s = time.monotonic() - began
                if silent_s > self._back_s:
                    text = f"the job has not answered for {silent_s:.0f} s: {error}"
                    raise PeerLostError(text) from error
                time.sleep(POLL_S)
            else:
                silence_s = time.monotonic() - began
                report.longest_silence_s = max(report.longest_silence_s, silence_s)
                self._late_s += silence_s if silence_s > LATE_S else 0.0
                return status

    def _do(self, act: Act, status: Status, report: Report, began: float) -> None:
        task = next((task for task in status.tasks if task.task == act.task), None)
        obstacle = _obstacle(act, task, status) or self._last_life(act)
        if not obstacle:
            assert task is not None
            _, pid = _process_of(task)
            try:
                os.kill(pid, signal.SIGKILL if act.kind == "kill" else signal.SIGSTOP)
            except ProcessLookupError:
                obstacle = _ENDED.format(task.process)
        now = time.monotonic()
        # The job may not have answered when the act was due.
        if obstacle or task is None:
            report.skipped.append(f"{act.kind} {act.task} at {now - began:.1f} s: {obstacle}")
            return
        if act.kind == "pause":
            self._paused.append((now + act.lasts_s, pid))
        report.done.append(CarriedOut(act, task.process, now))
        self._show(f"{now - began:6.1f} s  {act.kind} {act.task} ({task.process})")

    def _last_life(self, act: Act) -> str:
        """Return why a task must not be killed that would not be restarted, "" otherwise."""
        left_s = self._spent().get(act.task, 0.0) - time.time() if act.kind == "kill" else 0.0
        return f"it has no restart left for the next {left_s:.0f} s" if left_s > 0 else ""

    def _resume(self, now: float) -> None:
        """Resume the processes whose pause is over."""
        for paused in [paused for paused in self._paused if paused[0] <= now]:
            self._paused.remove(paused)
            with contextlib.suppress(ProcessLookupError):
                os.kill(paused[1], signal.SIGCONT)

    def _note_returns(self, report: Report, status: Status) -> None:
        for task in status.tasks:
            for done in report.done:
                if done.act.task == task.task and done.back_s is None and _is_back(done, task):
                    done.back_s = time.monotonic() - done.at


def _obstacle(act: Act, task: TaskStatus | None, status: Status) -> str:
    """Return the reason why an act is not carried out, "" if there is none."""
    if task is None or task.state in _ABSENT:
        return "the task was absent"
    host, pid = _process_of(task)
    if host != socket.gethostname():
        return f"it runs on {host}"
    if refusal := _not_ours(pid):
        return refusal.format(task.process)
    if act.kind == "kill" and _runs_others(task, status):
        return "other tasks would end with its process"
    return ""


def _runs_others(task: TaskStatus, status: Status) -> bool:
    """Return whether other tasks end with a task's process: `zmqtrain run` hosts the chief itself.

    The ps and the chief that a worker hosts do not count: all are started again.
    """
    host, pid = _process_of(task)
    for other in status.tasks:
        where, number = _process_of(other)
        is_own = (other.index, {other.role, task.role}) == (task.index, {Role.PS, Role.WORKER})
        is_own |= task.role == Role.WORKER and other.role == Role.CHIEF
        if other.task == task.task or where != host or is_own:
            continue
        with contextlib.suppress(psutil.Error):
            if number == pid or psutil.Process(number).ppid() == pid:
                return True
    return False


def _process_of(task: TaskStatus) -> tuple[str, int]:
    """Return the host and the pid that a task reports for itself; pid 0 if it reports none."""
    host, _, number = task.process.rpartition(":")
    is_pid = number.isascii() and number.isdigit() and len(number) < 10
    return host, int(number) if is_pid else 0


def _not_ours(pid: int) -> str:
    """Return why a process can be no task, "" if it may be: the pid that one reports may be a lie.

    The text has a place for the process.
    """
    if pid > 1:
        try:
            process = psutil.Process(pid)
            program = Path(process.exe()).name  # "" while it is ending
            if not program or process.status() == psutil.STATUS_ZOMBIE:
                return _ENDED
            if "python" in program and process.uids().real == os.getuid():
                return ""
        except psutil.NoSuchProcess:
            return _ENDED
        except psutil.Error:
            pass
    return "{} is not a Python process of this user"


def _is_back(done: CarriedOut, task: TaskStatus) -> bool:
    if task.state in _ABSENT:
        return False
    if done.act.kind == "kill":
        return task.process != done.process
    return time.monotonic() - done.at > done.act.lasts_s and task.silent_s < done.act.lasts_s


def figures(report: Report) -> list[dict[str, Any]]:
    """Return for each role the counts of acts and returns, and median and worst time of a kill."""
    result = []
    for role in ROLES:
        own = [done for done in report.done if done.act.role == role]
        back = [(done.act.kind, done.back_s) for done in own if done.back_s is not None]
        times = [back_s for kind, back_s in back if kind == "kill"]
        if own:
            median, worst = (statistics.median(times), max(times)) if times else (None, None)
            counts = {"role": role, "acts": len(own), "back": len(back)}
            result.append(counts | {"median_s": median, "worst_s": worst})
    return result
