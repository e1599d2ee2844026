"""The statuses of a job in their order, and the news between them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from zmqtrain.chief.job_view import ABSENT, JobView
from zmqtrain.config.cluster import Role
from zmqtrain.protocol.status import Status, TaskStatus

WINDOW = 6  # statuses over which speeds are measured
LEADER = "ps 0"


class StatusHistory:
    """The last statuses of a job, all of one clock.

    Ps 0 counts the restarts of others since it started, and forgets checkpoints when it is killed.
    The reports of its earlier lives are kept here.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Status]] = deque(maxlen=WINDOW)
        self._known: dict[str, TaskStatus] = {}  # as ps 0 last reported each task
        self.saved = 0  # step of the newest checkpoint that is known
        self.restarts: dict[str, int] = {}  # of each task
        self.away_s = 0.0  # how old the last status is, while ps 0 does not answer

    def resume(self, restarts: Mapping[str, int], saved: int) -> None:
        """Go on with the counts of another observer: restarts, and the last saved step."""
        for name, count in restarts.items():
            self.restarts[name] = max(count, self.restarts.get(name, 0))
        self.saved = max(saved, self.saved)

    def take(self, status: Status | None, at: float, saved: int = 0) -> list[str]:
        """Add a status, None if ps 0 did not answer; return the news since the last one.

        ``saved``: the step of a checkpoint that the status may lack.
        """
        if status is None:
            if not self._seen:
                return []
            was_away, self.away_s = self.away_s > 0, at - self._seen[-1][0]
            return [] if was_away else [f"{LEADER} does not answer"]
        saved = max(saved, _saved(status))
        news = self._news(status, saved) if self._seen else []
        if not self._seen:
            self.resume({task.task: task.restarts for task in status.tasks}, saved)
        self._known |= {task.task: task for task in status.tasks}
        self.saved = max(self.saved, saved)
        self.away_s = 0.0
        counted = [replace(t, restarts=self.restarts.get(t.task, 0)) for t in status.tasks]
        self._seen.append((at, replace(status, tasks=tuple(counted))))
        return news

    @property
    def view(self) -> JobView:
        """The last status, with speeds since the oldest one that is still known."""
        (began, earlier), (at, status) = self._seen[0], self._seen[-1]
        return JobView(status, earlier, at - began)

    @property
    def end(self) -> str:
        """The outcome of the job in words, once no further status comes."""
        is_known = self.view.status.stop or self.view.status.failure
        return self.view.state if is_known else "the job has ended"

    def _news(self, status: Status, saved: int) -> list[str]:
        """Return a sentence for each thing that happened since the last status."""
        before = self._seen[-1][1]
        is_new = status.group == before.group and self._is_new_leader(status)
        found = [f"{LEADER} answers again"] if self.away_s and not is_new else []
        for task in status.tasks:
            earlier = self._known.get(task.task)
            restarts = is_new if task.task == LEADER else _restarts(task, earlier, is_new)
            self.restarts[task.task] = self.restarts.get(task.task, 0) + restarts
            is_away = task.task == LEADER and self.away_s > 0
            found.append(_news_of(task, earlier, restarts, is_away))
        if status.step < before.step:
            found.append(f"the job went back from step {before.step} to {status.step}")
            self.saved = min(self.saved, status.step)
        if saved > self.saved:
            found.append(f"a checkpoint of step {saved} was saved")
        if status.group > before.group:
            found.append(f"group {JobView.of(status).group} goes on")
        if status.policy != before.policy:
            found.append(f"the policy is {status.policy}; it was {before.policy}")
        return [*filter(None, found)]

    def _is_new_leader(self, status: Status) -> bool:
        """Return whether ps 0 was started since the last status."""
        lives = [task.incarnation for task in status.tasks if task.task == LEADER]
        earlier = self._known.get(LEADER)
        return earlier is not None and lives not in ([], [earlier.incarnation])


def _saved(status: Status) -> int:
    """Return the step of the newest checkpoint that the chief has reported to this life of ps 0."""
    return max((task.step for task in status.tasks if task.role == Role.CHIEF), default=0)


def _restarts(task: TaskStatus, earlier: TaskStatus | None, is_new_leader: bool) -> int:
    """Return how often a task was started again since ps 0 reported on it."""
    if earlier is None:
        return 0
    if is_new_leader:  # it counts from 0 again
        return max(task.restarts, task.process != earlier.process)
    return max(0, task.restarts - earlier.restarts)


def _news_of(task: TaskStatus, earlier: TaskStatus | None, restarts: int, is_away: bool) -> str:
    if earlier is None:
        return f"{task.task} joined"
    if restarts:
        was_lost = is_away or earlier.state in ABSENT
        return f"{task.task} {'' if was_lost else 'ended and '}was started again"
    if task.state == "left" != earlier.state:
        return f"{task.task} left"
    if task.role != Role.WORKER and (task.state == "silent") != (earlier.state == "silent"):
        return f"{task.task} {'does not answer' if task.state == 'silent' else 'answers again'}"
    return ""
