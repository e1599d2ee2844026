"""The model behind `status`, `why`, `top` and `run`: a job in words and figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from zmqtrain.config.cluster import Role
from zmqtrain.protocol.status import Status, TableStatus, TaskStatus, Wait
from zmqtrain.units import NOTHING, counted, data_size, duration, measure_text, rate, shortened

SHORT_S = 0.5  # shorter waits are normal: a push in flight, a step about to end
STALL_S, STALL_STEPS = 5.0, 10.0  # without a step: seconds, and usual steps; both count as a stall
ABSENT = ("silent", "left")
MISSED_S = 2.5  # of silence: two heartbeats, which are sent every second by default
SHOWN_LEASES = 2


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task: its text in each column, and the seconds that it spent in each phase of a step."""

    task: TaskStatus
    texts: dict[str, object]
    spent_s: tuple[float, ...]

    @property
    def rank(self) -> tuple[bool, int]:
        """A key that sorts tasks which others may wait for first."""
        return self.task.state not in ABSENT, -(self.task.behind or 0)


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as its status shows it.

    Speeds are measured since ``earlier``, ``seconds`` before; 0: no other status is known.
    """

    status: Status
    earlier: Status
    seconds: float = 0.0

    @classmethod
    def of(cls, status: Status) -> JobView:
        return cls(status, status)

    @property
    def _trained(self) -> str:
        """The text "18 s", or "18 s since step 400" if ps 0 was started at that step."""
        status = self.status
        began = status.step - round(status.steps_per_second * status.seconds)
        since = f" since step {began}" if status.seconds and began > 1 else ""
        return f"{duration(status.seconds)}{since}"

    @property
    def state(self) -> str:
        """Whether the job waits, trains, or has ended, and how."""
        status = self.status
        if status.failure:
            return f"failed: {status.failure}"
        if status.stop:
            return f"ended: {status.stop}"
        if not status.initialised:
            return "waiting for the chief to begin the job"
        parts = [f"training for {self._trained}"]
        if not status.seconds and not status.idle_s:  # since ps 0 was started
            since = f"since step {status.step}" if status.step else "yet"
            parts = [f"no step has been made {since}"]
        if self.is_stalled:
            parts.append(f"no step for {duration(status.idle_s)}")
        if status.save_wanted:
            parts.append("checkpoint requested")
        if status.stop_wanted:
            parts.append("stop requested")
        failure = status.save_failure
        return ", ".join(parts) + (f"; the last checkpoint failed: {failure}" if failure else "")

    @property
    def is_stalled(self) -> bool:
        """Whether the last step took place long ago, compared with the usual time of a step."""
        speed = self.status.steps_per_second
        return self.status.idle_s > max(STALL_S, STALL_STEPS / speed if speed else 0.0)

    @property
    def loss(self) -> str:
        return _loss(self.status.loss)

    @property
    def remaining(self) -> str:
        """The text ", about 18 s left", or "" if that is not known."""
        status = self.status
        is_known = status.steps_per_second and 0 < status.done < 1 and not status.failure
        if not is_known or self.is_stalled:
            return ""
        left_s = status.step * (1 / status.done - 1) / status.steps_per_second
        return f", about {duration(left_s)} left"

    @property
    def group(self) -> str:
        """The number and the members of the group of workers, such as "2 (worker 1, worker 2)"."""
        members = ", ".join(f"worker {worker}" for worker in self.status.group_members)
        return f"{self.status.group} ({members})"

    def figures(self) -> dict[str, str]:
        status = self.status
        change = f", changes to {status.switching} at the next barrier" if status.switching else ""
        staleness = "mean {mean:.2f}, p50 {p50:.0f}, p99 {p99:.0f}, max {max:.0f} versions"
        figures = {
            "state": self.state,
            "step": self._progress(),
            "strategy": f"{status.strategy}, exchange {status.exchange}",
            "policy": status.policy + change,
            "loss": f"{self.loss} at the last push",
            "examples": str(status.examples),
            "pushes": ", ".join(f"{count} {what}" for what, count in status.pushes.items()),
            "staleness": staleness.format(**status.staleness),
            "local steps": _rounds(status),
            "tables": shortened([*map(_table_text, status.tables.items())]),
            "group": self.group if status.group else "",
            "rosters": str(status.rosters or ""),
        }
        return {name: text for name, text in figures.items() if text}

    def speeds(self) -> list[str]:
        """Return the speed since the earlier status; that of the whole run if it is not known."""
        now, before = self.status, self.earlier
        if not self.seconds or now.step < before.step:
            return [f"{rate(now.steps_per_second)} steps/s"]
        return [
            f"{rate((now.step - before.step) / self.seconds)} steps/s",
            f"{rate((now.examples - before.examples) / self.seconds)} examples/s",
        ]

    def headline(self) -> list[str]:
        """Return the most important figures, in a few words each."""
        status = self.status
        change = f" -> {status.switching}" if status.switching else ""
        return [
            *self.speeds(),
            f"loss {self.loss}",
            f"{status.policy}{change}",
            *filter(None, [_rounds(status)]),
            "staleness {mean:.2f} (p99 {p99:.0f})".format(**status.staleness),
            "{dropped} dropped".format(**status.pushes),
            *([f"group {status.group}"] if status.group > 1 else []),
            *([counted(status.rosters, "roster")] if status.rosters else []),
        ]

    def tables(self) -> str:
        """Return how many rows all tables have, and how fast they grow; "" without tables."""
        now, before = (
            sum(table.trained for table in status.tables.values())
            for status in (self.status, self.earlier)
        )
        if not (tables := self.status.tables):
            return ""
        nbytes = data_size(sum(table.nbytes for table in tables.values()))
        growth = f", {(now - before) / self.seconds:+.0f} rows/s" if self.seconds else ""
        return f"{counted(len(tables), 'table')}: {now} rows trained, {nbytes}{growth}"

    def tasks(self) -> list[TaskRow]:
        """Return a row for each task."""
        before = {task.task: task for task in self.earlier.tasks}
        return [
            TaskRow(task, self._texts(task, known), spent_s(task, known))
            for task in self.status.tasks
            for known in [before.get(task.task)]
        ]

    def waits(self, shortest_s: float = SHORT_S) -> list[Wait]:
        """Return the waits that last this long, the longest first; all before the job begins."""
        waits = sorted(self.status.waits, key=lambda wait: -wait.since_s)
        return [each for each in waits if each.since_s >= shortest_s or not self.status.initialised]

    def absent(self) -> list[TaskStatus]:
        """Return the tasks that left or missed two heartbeats, the longest absence first."""
        tasks = self.status.tasks
        found = [task for task in tasks if task.state in ABSENT or task.silent_s >= MISSED_S]
        return sorted(found, key=lambda task: -task.silent_s)

    def absences(self) -> list[str]:
        """Return a sentence for each absent task: since when, and how many tasks wait for it."""
        return [self._absence(task) for task in self.absent()]

    def changes(self) -> list[str]:
        """Return a sentence for each thing that ends the job or is about to change it."""
        status, found = self.status, []
        if status.failure:
            found.append(f"the job ends in failure: {status.failure}")
        if status.stop:
            found.append(f"the job needs no more gradients: {status.stop}")
        if status.initialised and not any(task.role == Role.WORKER for task in status.tasks):
            found.append("no worker has joined: start some, or see in their logs why they ended")
        found += [
            f"the table {name!r} keeps {table.trained} of at most {table.max_rows} rows: it has "
            f"forgotten {table.forgotten} to make room for others (max_rows)"
            for name, table in status.tables.items()
            if table.is_full
        ]
        if status.switching:
            found.append(f"the policy changes to {status.switching} once no worker computes")
        return found

    def why_json(self) -> dict[str, object]:
        """Return the waits, the absent tasks, and pending changes of the job for a script."""
        return {
            "waits": [asdict(wait) for wait in self.status.waits],
            "absent": [asdict(task) for task in self.absent()],
            "stop": self.status.stop,
            "failure": self.status.failure,
            "switching": self.status.switching,
        }

    def _progress(self) -> str:
        step, steps, share = self.status.step, self.status.steps, 100 * self.status.done
        text = str(step)
        if steps or self.status.epoch:
            text += f" of {steps}" if steps else f", {self.status.epoch}"
            text += f" ({share:.1f} %)"
        if self.status.steps_per_second > 0 and not self.is_stalled:
            text += f", {rate(self.status.steps_per_second)} steps/s"
        return text + self.remaining

    def _texts(self, task: TaskStatus, earlier: TaskStatus | None) -> dict[str, object]:
        is_chief, has_loss = task.role == Role.CHIEF, task.role == Role.WORKER and task.step
        return {
            "task": task.task,
            "state": task.state,
            "step": NOTHING if is_chief else task.step,
            "steps/s": self._speed(task, earlier),
            "behind": NOTHING if task.behind is None else task.behind,
            "loss": _loss(task.loss) if has_loss else NOTHING,
            "holds": _holding(task),
            "silent": duration(task.silent_s),
            "joined": _joined(task),
            "lane": _lane(task),
            "process": task.process,
            "metrics": task.metrics or NOTHING,
            "restarts": task.restarts,
        }

    def _speed(self, task: TaskStatus, earlier: TaskStatus | None) -> str:
        if task.role == Role.CHIEF or earlier is None or not self.seconds:
            return NOTHING
        steps = task.step - earlier.step
        return rate(steps / self.seconds) if steps >= 0 else NOTHING

    def _absence(self, task: TaskStatus) -> str:
        for_s, waits = duration(task.silent_s), self.status.waits
        text = f"left {for_s} ago" if task.state == "left" else f"has been silent for {for_s}"
        waiting = {wait.owner for wait in waits if task.task in wait.peer.split(", ")}
        if waiting:
            text += f"; {len(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it"
        if self.status.group and task.role == Role.PS:  # the others can go on without its host
            limits = [wait.until_s for wait in waits if wait.peer == task.task]
            left_s = [limit for limit in limits if limit is not None]
            when = f"in {duration(max(left_s))} " if left_s else ""
            text += f"; {when}the other workers go on without it, if they are enough"
        return f"{task.task} ({task.process}) {text}"


def spent_s(task: TaskStatus, earlier: TaskStatus | None) -> tuple[float, ...]:
    """Return the seconds that a worker spent in each phase since an earlier status.

    Since the worker started, if no step has ended in between.
    """
    now = task.phases_s
    if earlier is None or len(earlier.phases_s) != len(now):
        return now
    since = tuple(b - a for a, b in zip(earlier.phases_s, now, strict=True))
    return since if sum(since) > 0 and min(since) >= 0 else now


def wait_row(wait: Wait) -> Sequence[str]:
    """Return the owner of a wait, its peer, since and until when it waits, and why."""
    until = "while it lives" if wait.until_s is None else f"in {duration(wait.until_s)}"
    return wait.owner, wait.peer, duration(wait.since_s), until, wait.reason


def _loss(loss: float) -> str:
    return NOTHING if math.isnan(loss) else measure_text(loss)


def _rounds(status: Status) -> str:
    """Return the number of rounds of local steps, their bytes, and the agreement of the last."""
    if not status.rounds:
        return ""
    most = max((task.progress.local_step for task in status.tasks), default=0)
    known = status.of_rounds
    parts = [counted(status.rounds, "round"), f"step {most} of the next"]
    if "agreement" in known:
        parts.append(f"agreement {known['agreement']:.2f}")
    if "nbytes_per_batch" in known:
        parts.append(f"{data_size(round(known['nbytes_per_batch']))} a batch")
    return ", ".join(parts)


def _holding(task: TaskStatus) -> str:
    if task.nbytes:
        return data_size(task.nbytes)
    if task.role == Role.CHIEF and task.step:
        return f"saved {task.step}"
    if not task.leases:
        return NOTHING
    shown = ", ".join(map(str, task.leases[:SHOWN_LEASES]))
    further = len(task.leases) - SHOWN_LEASES
    return shown + (f", +{further}" if further > 0 else "")


def _joined(task: TaskStatus) -> str:
    """Return when this life of a task began; its incarnation is that time in milliseconds."""
    if not task.incarnation:
        return NOTHING
    return datetime.fromtimestamp(task.incarnation / 1000).strftime("%a %H:%M")


def _lane(task: TaskStatus) -> str:
    """Return a worker's lane to every ps, or the list of lanes if they differ."""
    first, *others = task.lanes.split(",")
    return (task.lanes if {*others} - {first} else first) or NOTHING


def _table_text(item: tuple[str, TableStatus]) -> str:
    name, table = item
    others = {"not admitted": table.waiting, "forgotten": table.forgotten}
    parts = [data_size(table.nbytes)]
    parts += [f"{count} {what}" for what, count in others.items() if count]
    if table.hottest:
        parts.append(f"hottest {' '.join(str(id_) for id_, _ in table.hottest[:3])}")
    return f"{name} {table.trained} rows trained ({', '.join(parts)})"
