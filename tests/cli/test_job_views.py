"""The views of `status`, `why` and `top`: one model of a job, in many situations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tests.cli.conftest import task
from tests.golden import Snapshot
from zmqtrain.chief.job_view import JobView, spent_s
from zmqtrain.chief.status_history import StatusHistory
from zmqtrain.cli.output import text_of
from zmqtrain.cli.status import status_view, why_view
from zmqtrain.cli.top_view import OTHER_ROWS, PHASES, phase_bar, top_view
from zmqtrain.protocol.status import Progress, Status, TableStatus, Wait

NO_PUSHES = dict.fromkeys(("applied", "dropped", "duplicate", "refused"), 0)


def with_tasks(status: Status, **changes: dict[str, Any]) -> Status:
    """Return a status in which these tasks differ, such as ``worker_1``; a new one is added."""
    tasks = {each.task: each for each in status.tasks}
    for name in changes:
        known = tasks.get(name.replace("_", " "), task(name.replace("_", " "), "computing", 0))
        tasks[known.task] = replace(known, **changes[name])
    return replace(status, tasks=tuple(tasks.values()))


def without_workers(status: Status) -> Status:
    tasks = tuple(each for each in status.tasks if each.role != "worker")
    return replace(status, tasks=tasks, waits=())


def with_absent_tasks(status: Status) -> Status:
    """Worker 0 has left, worker 1 is silent, ps 1 has missed two heartbeats."""
    changed = with_tasks(
        status,
        worker_0={"state": "left", "silent_s": 95.0, "process": "a:1", "behind": None},
        worker_1={"state": "silent", "silent_s": 6.2, "process": "b:2"},
        ps_1={"silent_s": 3.0, "process": "c:3"},
    )
    waits = (
        Wait("worker 2", "ps 1", "it has not answered push 7", 2.9),
        Wait("worker 2", "ps 1", "it has not welcomed us", 2.9),
        Wait("worker 3", "worker 1, worker 2", "step 9 has 1 of 3 gradients", 2.9),
    )
    return replace(changed, waits=waits)


def without_a_host(status: Status) -> Status:
    """The host of a part is silent, and the others can go on without it."""
    changed = with_tasks(status, ps_1={"state": "silent", "silent_s": 6.2, "process": "b:2"})
    wait = Wait("worker 0", "ps 1", "it has not answered push 7", 6.0, 53.8)
    return replace(changed, waits=(wait,), group=1)


def before_the_job_begins(status: Status) -> Status:
    wait = Wait("ps 0", "chief 0", "no chief has initialised the parameters", 0.2, 299.8)
    return replace(without_workers(status), initialised=False, waits=(wait,))


TABLES = {
    "user.weight": TableStatus(10_000, 8581, 901_000, updated=40_000, hottest=((7, 31), (-2, 9))),
    "words": TableStatus(None, 990, 2**21, 1000, waiting=44, updated=7000, forgotten=512),
}


def changed(**changes: Any) -> Callable[[Status], Status]:
    return lambda status: replace(status, **changes)


def with_progress(status: Status, **changes: Any) -> Status:
    """Return a status in which workers are within a round."""
    progress = Progress(batches=620, nbytes=52_000_000, local_step=17)
    tasks = [replace(t, progress=progress) if t.role == "worker" else t for t in status.tasks]
    return replace(status, policy="local-steps:50", tasks=tuple(tasks), **changes)


SITUATIONS: dict[str, Callable[[Status], Status]] = {
    "training": changed(),
    "before the job begins": before_the_job_begins,
    "before the first step": changed(step=0, steps_per_second=0.0, seconds=0.0, pushes=NO_PUSHES),
    "at step 0": changed(step=0, steps_per_second=0.0, pushes=NO_PUSHES, loss=float("nan")),
    "stalled": changed(idle_s=42.0),
    "a step of 10 s under way": changed(idle_s=80.0, steps_per_second=0.1),
    "by epochs": changed(steps=0),
    "a save is requested": changed(save_wanted=True, stop_wanted=True),
    "a save failed": changed(save_failure="no room"),
    "policy changes": changed(switching="hogwild", waits=()),
    "local steps": lambda status: with_progress(status, rounds=12, agreement=0.874),
    "groups and rosters": changed(group=2, group_members=(1, 2), rosters=7),
    "with tables": changed(tables=TABLES),
    "absent tasks": with_absent_tasks,
    "without a host": without_a_host,
    "without workers": without_workers,
    "done": changed(step=3000, stop="step 3000 of 3000 is done", waits=()),
    "failed": changed(failure="11 gradients held NaN", stop="x"),
}

situations = pytest.mark.parametrize("situation", SITUATIONS)


@situations
@pytest.mark.usefixtures("utc")
def test_status_shows_a_job(situation: str, training: Status, snapshot: Snapshot) -> None:
    view = JobView.of(SITUATIONS[situation](training))
    snapshot(text_of(status_view(view, "digits.py at 127.0.0.1:2222"), 80), "status")


@situations
def test_why_shows_a_job(situation: str, training: Status, snapshot: Snapshot) -> None:
    snapshot(text_of(why_view(JobView.of(SITUATIONS[situation](training)))), "why")


def test_why_shows_short_waits_on_request(training: Status, snapshot: Snapshot) -> None:
    snapshot(text_of(why_view(JobView.of(training), show_all=True)), "why")


def later(status: Status) -> Status:
    """Return this status some steps later, in which worker 0 computed and worker 1 waited."""
    moved = with_tasks(
        status,
        worker_0={"step": 1305, "phases_s": (0.0, 0.0, 4.0, 0.0, 0.0, 0.0)},
        worker_1={"step": 1245, "phases_s": (1.0, 0.0, 0.0, 0.0, 0.0, 3.0), "restarts": 2},
    )
    tables = {name: replace(one, trained=one.trained + 30) for name, one in status.tables.items()}
    examples = status.examples + 20000
    return replace(moved, step=status.step + 200, examples=examples, tables=tables)


def watched(*statuses: Status | None) -> StatusHistory:
    """Return what is known of a job after these answers, two seconds apart."""
    result = StatusHistory()
    for number, status in enumerate(statuses):
        result.take(status, 2.0 * number)
    return result


def top(seen: StatusHistory, width: int = 80, rows: int = 9) -> str:
    console = Console(file=StringIO(), width=width, height=rows + OTHER_ROWS)
    return text_of(top_view(seen, "digits.py", ["12:00:00  worker 1 left"], console), width)


@situations
def test_top_shows_a_job(situation: str, training: Status, snapshot: Snapshot) -> None:
    status = SITUATIONS[situation](training)
    seen = watched(status, later(status) if situation in ("training", "with tables") else status)
    snapshot(top(seen), "top")


@pytest.mark.parametrize("width", [40, 120])
def test_top_fits_the_columns_of_a_terminal(
    width: int, training: Status, snapshot: Snapshot
) -> None:
    shown = top(watched(training, later(training)), width)
    assert all(len(text) <= width for text in shown.splitlines())
    snapshot(shown, "top")


def test_low_terminal_shows_the_tasks_that_delay_others(
    training: Status, snapshot: Snapshot
) -> None:
    gone = with_tasks(training, worker_2={"state": "left", "step": 7})
    snapshot(top(watched(gone), rows=5), "top")


def test_last_answer_stays_while_ps_0_is_away(training: Status) -> None:
    seen = watched(training, None, None)
    assert "ps 0 has not answered for 4.0 s" in top(seen)
    assert seen.take(training, 6.0) == ["ps 0 answers again"]
    assert "has not answered for" not in top(seen)


@pytest.mark.parametrize(
    ("lanes", "shown"),
    [("", "-"), ("tcp", "tcp"), ("shm,shm,shm", "shm"), ("shm,tcp,tcp", "shm,tcp,tcp")],
)
def test_lanes_are_listed_only_if_they_differ(training: Status, lanes: str, shown: str) -> None:
    row = JobView.of(with_tasks(training, worker_1={"lanes": lanes})).tasks()[-1]
    assert row.texts["lane"] == shown


@pytest.mark.parametrize(
    ("changes", "news"),
    [
        ({}, []),
        ({"step": 1100}, ["the job went back from step 1200 to 1100"]),
        ({"group": 2, "group_members": (1, 2)}, ["group 2 (worker 1, worker 2) goes on"]),
        ({"policy": "hogwild"}, ["the policy is hogwild; it was sync-replicas"]),
        ({"worker_1": {"state": "left"}}, ["worker 1 left"]),
        ({"worker_1": {"restarts": 1}}, ["worker 1 ended and was started again"]),
        ({"ps_1": {"state": "silent"}}, ["ps 1 does not answer"]),
        ({"ps_0": {"incarnation": 7}}, ["ps 0 ended and was started again"]),
        ({"ps_0": {"incarnation": 7}, "group": 1}, ["group 1 () goes on"]),
        ({"chief_0": {"step": 800}}, []),
        ({"chief_0": {"step": 1200}}, ["a checkpoint of step 1200 was saved"]),
        ({"worker_2": {}}, ["worker 2 joined"]),
    ],
)
def test_news_are_differences_of_two_statuses(
    changes: dict[str, Any], news: list[str], training: Status
) -> None:
    tasks = {name: values for name, values in changes.items() if name[-2:-1] == "_"}
    others = {name: value for name, value in changes.items() if name not in tasks}
    after = replace(with_tasks(training, **tasks), **others)
    seen = watched(training)
    assert seen.take(after, 2.0) == news
    assert seen.take(after, 4.0) == []


def test_restarts_and_checkpoints_are_remembered_when_ps_0_forgets_them(training: Status) -> None:
    before = with_tasks(training, worker_0={"restarts": 2}, ps_1={"restarts": 1})
    reborn = with_tasks(
        training,
        ps_0={"incarnation": 7},
        ps_1={"process": "host:101"},  # it was killed, too
        chief_0={"step": 0},
    )
    seen = watched(before)
    assert seen.take(None, 2.0) == ["ps 0 does not answer"]
    assert seen.take(reborn, 4.0) == ["ps 0 was started again", "ps 1 ended and was started again"]
    assert seen.take(with_tasks(reborn, chief_0={"step": 800}), 6.0) == []
    counted = {task.task: task.restarts for task in seen.view.status.tasks}
    assert counted == {"ps 0": 1, "ps 1": 2, "chief 0": 0, "worker 0": 2, "worker 1": 0}


def test_task_that_ps_0_does_not_know_yet_does_not_join_twice(training: Status) -> None:
    reborn = with_tasks(without_workers(training), ps_0={"incarnation": 7})
    seen = watched(training, reborn)
    assert seen.take(with_tasks(training, ps_0={"incarnation": 7}), 4.0) == []


@pytest.mark.parametrize(
    ("seconds", "bar"),
    [
        ((), ""),
        ((0.0, 0.0, 0.0, 0.0, 0.0, 0.0), ""),
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0), "--~~##==++.."),
        ((0.0, 0.0, 2.0, 1.0, 0.0, 0.0), "########===="),
        ((0.04, 0.0, 0.96, 0.0, 0.0, 0.0), "############"),
    ],
)
def test_bar_is_full_and_its_parts_are_the_phases(seconds: tuple[float, ...], bar: str) -> None:
    assert phase_bar(seconds, "-~#=+.", 12).plain == bar
    assert len(PHASES) == 6


@pytest.mark.parametrize(
    ("before", "now", "spent"),
    [
        ((1.0, 1.0), (1.5, 3.0), (0.5, 2.0)),
        ((), (1.5, 3.0), (1.5, 3.0)),  # no heartbeat before
        ((1.0, 1.0), (), ()),  # ps 0 has started again
        ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)),  # in the middle of a long step
        ((9.0, 1.0), (0.5, 11.0), (0.5, 11.0)),  # the worker has started again
    ],
)
def test_phases_are_those_of_the_last_seconds(
    before: tuple[float, ...], now: tuple[float, ...], spent: tuple[float, ...]
) -> None:
    worker = task("worker 0", "computing", 5)
    assert spent_s(replace(worker, phases_s=now), replace(worker, phases_s=before)) == spent
