"""What a status says in words, for `zmqtrain status`, `why`, `top` and `run`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zmqtrain.cli.output import NOTHING
from zmqtrain.config.cluster import Role
from zmqtrain.protocol.status import Status, TaskStatus, Wait
from zmqtrain.units import duration

STATE_STYLES = {"silent": "yellow", "left": "yellow", "waiting": "cyan"}
SHORT_S = 0.5  # shorter waits are normal: a push in flight, a step about to end
STALL_S, STALL_STEPS = 5.0, 10.0  # without a step: seconds, and usual steps; both count as a stall
ABSENT = ("silent", "left")
MISSED_S = 2.5  # of silence: two heartbeats, which are sent every second by default


def state_of(status: Status) -> str:
    """Say whether the job waits, trains, or has ended, and how."""
    if status.failure:
        return f"failed: {status.failure}"
    if status.stop:
        return f"done: {status.stop}"
    if not status.initialised:
        return "waiting for the chief to begin the job"
    saving = ", checkpoint requested" if status.save_wanted else ""
    stopping = ", stop requested" if status.stop_wanted else ""
    failing = f"; the last checkpoint failed: {status.save_failure}" if status.save_failure else ""
    still = f", no step for {duration(status.idle_s)}" if is_stalled(status) else ""
    return f"training for {_trained(status)}{still}{saving}{stopping}{failing}"


def _trained(status: Status) -> str:
    """Return "18 s"; or "18 s since step 400" if the ps that tells it has begun at that step."""
    began = status.step - round(status.steps_per_second * status.seconds)
    since = f" since step {began}" if status.seconds and began > 1 else ""
    return f"{duration(status.seconds)}{since}"


def is_stalled(status: Status) -> bool:
    """Say whether no step was made for long, compared with the steps before."""
    usual_s = 1 / status.steps_per_second if status.steps_per_second else 0.0
    return status.idle_s > max(STALL_S, STALL_STEPS * usual_s)


def remaining_of(status: Status) -> str:
    """Return ", about 18 s left", or "" if that is not known."""
    if not status.steps_per_second or status.step >= status.steps or status.failure:
        return ""
    if is_stalled(status):
        return ""
    return f", about {duration((status.steps - status.step) / status.steps_per_second)} left"


def group_of(status: Status) -> str:
    """Return "2 (worker 1, worker 2)", the number and the members of the group of workers."""
    members = ", ".join(f"worker {worker}" for worker in status.group_members)
    return f"{status.group} ({members})"


def loss_of(loss: float) -> str:
    """Return a loss, "-" if there is none yet."""
    return NOTHING if math.isnan(loss) else f"{loss:.4f}"


def long_waits(status: Status, shortest_s: float = SHORT_S) -> list[Wait]:
    """Return the waits that have lasted for this time, the longest first.

    Before the job begins, every wait matters.
    """
    waits = sorted(status.waits, key=lambda wait: wait.since_s, reverse=True)
    return [wait for wait in waits if wait.since_s >= shortest_s or not status.initialised]


def absences(status: Status) -> list[str]:
    """Say of each absent task how long it has been so, and how many wait for it."""
    return [
        _absence(task, status.waits) + (_succession(task, status.waits) if status.group else "")
        for task in absent(status)
    ]


def _absence(task: TaskStatus, waits: Sequence[Wait]) -> str:
    for_s = duration(task.silent_s)
    absent = f"left {for_s} ago" if task.state == "left" else f"has been silent for {for_s}"
    waiting = {wait.owner for wait in waits if task.task in wait.peer.split(", ")}
    verb = "waits" if len(waiting) == 1 else "wait"
    who = f"; {len(waiting)} {verb} for it" if waiting else ""
    return f"{task.task} ({task.process}) {absent}{who}"


def _succession(task: TaskStatus, waits: Sequence[Wait]) -> str:
    """Say when the others go on without the host of a ps, if somebody waits for that."""
    if task.role != Role.PS:
        return ""
    left_s = [wait.until_s for wait in waits if wait.peer == task.task and wait.until_s is not None]
    when = f"in {duration(max(left_s))} " if left_s else ""
    return f"; {when}the other workers go on without it, if they are enough"


def absent(status: Status) -> list[TaskStatus]:
    """Return the tasks that have left or missed two heartbeats, the longest absence first."""
    found = [t for t in status.tasks if t.state in ABSENT or t.silent_s >= MISSED_S]
    return sorted(found, key=lambda task: task.silent_s, reverse=True)
