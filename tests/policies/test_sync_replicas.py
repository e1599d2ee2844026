"""Sync replicas: one gradient a worker, backups, several batches; workers join and leave."""

from __future__ import annotations

import pytest

from tests.policies.plays import playing

BEGUN_BY_TWO = """
    start 0 2 -> -
    join 0    -> -
    join 1    -> release 0, release 1
"""
BEGUN_BY_THREE = """
    start 0 3 -> -
    join 0    -> -
    join 1    -> -
    join 2    -> release 0, release 1, release 2
"""


PLAYS = {
    "first step waits for every expected worker": ("sync-replicas", "", """
        start 0 3 -> -
        join 2    -> -
        held      -> 2 waits for 0 1
        join 0    -> -
        leave 2   -> -
        join 1    -> -
        held      -> 0 waits for 2, 1 waits for 2
        join 2    -> release 0, release 1, release 2
        held      -> -
    """),
    "step is the mean of one gradient a worker": ("sync-replicas", BEGUN_BY_THREE, """
        push 1    -> -
        push 2    -> -
        held      -> 1 waits for 0, 2 waits for 0
        push 0    -> reduce 0 1 2, release 0, release 1, release 2
        push 2    -> -
        push 1    -> -
        push 0    -> reduce 0 1 2, release 0, release 1, release 2
    """),
    "late gradients are dropped": ("sync-replicas:aggregate=2", BEGUN_BY_THREE, """
        push 0    -> -
        push 2    -> reduce 0 2, release 0, release 2
        push 0    -> -
        held      -> 0 waits for 2
        push 2    -> reduce 0 2, release 0, release 2
        push 1    -> drop 1 stale, release 1
        push 1    -> -
        push 0    -> reduce 0 1, release 0, release 1
        push 0    -> -
        push 2    -> drop 2 stale, release 2
        push 2    -> reduce 0 2, release 0, release 2
    """),
    "workers compute several batches of a larger step":
    ("sync-replicas:aggregate=4", BEGUN_BY_TWO, """
        push 0    -> accumulate 0, release 0
        push 0    -> accumulate 0, release 0
        push 0    -> -
        held      -> 0 waits for 1
        push 1    -> reduce 0 1, release 0, release 1
    """),
    "worker that leaves releases the barrier: before its push": ("sync-replicas", BEGUN_BY_TWO, """
        push 0  -> -
        leave 1 -> reduce 0, release 0
        held    -> -
    """),
    "worker that leaves releases the barrier: after its push": ("sync-replicas", BEGUN_BY_TWO, """
        push 0  -> -
        leave 0 -> -
        push 1  -> reduce 0 1, release 1
        push 1  -> reduce 1, release 1
    """),
    "worker that leaves releases the barrier: all but one": ("sync-replicas", BEGUN_BY_TWO, """
        leave 0 -> -
        push 1  -> reduce 1, release 1
    """),
    "worker that leaves releases the barrier: the last, before its push":
    ("sync-replicas", BEGUN_BY_TWO, """
        leave 0 -> -
        leave 1 -> -
        join 1  -> release 1
        push 1  -> reduce 1, release 1
        join 0  -> -
        held    -> 0 waits for 1
        push 1  -> reduce 1, release 0, release 1
    """),
    "worker that leaves releases the barrier: the last, while another's gradient lies ready":
    ("sync-replicas", BEGUN_BY_TWO, """
        push 0  -> -
        leave 0 -> -
        leave 1 -> reduce 0
        join 0  -> release 0
        push 0  -> reduce 0, release 0
    """),
    "worker that leaves releases the barrier: aggregate, before its push":
    ("sync-replicas:aggregate=2", BEGUN_BY_TWO, """
        push 0  -> -
        leave 1 -> accumulate 0, release 0
        push 0  -> reduce 0, release 0
        push 0  -> accumulate 0, release 0
    """),
    "worker that leaves releases the barrier: aggregate, after its push":
    ("sync-replicas:aggregate=2", BEGUN_BY_TWO, """
        push 0  -> -
        leave 0 -> -
        push 1  -> reduce 0 1, release 1
        push 1  -> accumulate 1, release 1
    """),
    "worker that leaves releases the barrier: aggregate, everyone":
    ("sync-replicas:aggregate=2", BEGUN_BY_TWO, """
        push 0  -> -
        leave 0 -> -
        leave 1 -> -
        join 0  -> accumulate 0, release 0
        push 0  -> reduce 0, release 0
    """),
    "worker that leaves is replaced by one that waits":
    ("sync-replicas:aggregate=2", BEGUN_BY_TWO, """
        join 2  -> -
        push 0  -> -
        held    -> 0 waits for 1, 2 waits for 1
        leave 1 -> release 2
        push 2  -> reduce 0 2, release 0, release 2
    """),
    "step does not wait for a worker whose gradient will be stale":
    ("sync-replicas:aggregate=2", BEGUN_BY_THREE, """
        push 0  -> -
        push 1  -> reduce 0 1, release 0, release 1
        push 0  -> -
        leave 1 -> accumulate 0, release 0
        push 0  -> reduce 0, release 0
        push 2  -> drop 2 stale, release 2
    """),
    "joiner takes part from the next step on": ("sync-replicas", BEGUN_BY_TWO, """
        push 0  -> -
        join 2  -> -
        held    -> 0 waits for 1, 2 waits for 1
        push 1  -> reduce 0 1, release 0, release 1, release 2
        push 0  -> -
        push 1  -> -
        push 2  -> reduce 0 1 2, release 0, release 1, release 2
    """),
    "joiners begin a step together when everyone else has left": ("sync-replicas", BEGUN_BY_TWO, """
        join 2  -> -
        join 3  -> -
        leave 0 -> -
        leave 1 -> release 2, release 3
        push 2  -> -
        push 3  -> reduce 2 3, release 2, release 3
    """),
    "joiner helps a step that lacks hands": ("sync-replicas:aggregate=3", BEGUN_BY_TWO, """
        join 2  -> release 2
        push 2  -> -
        push 0  -> -
        push 1  -> reduce 0 1 2, release 0, release 1, release 2
    """),
    "gradient of a worker that rejoined counts once: after its push":
    ("sync-replicas", BEGUN_BY_TWO, """
        push 0  -> -
        leave 0 -> -
        join 0  -> -
        push 1  -> reduce 0 1, release 0, release 1
    """),
    "gradient of a worker that rejoined counts once: before its push":
    ("sync-replicas", BEGUN_BY_TWO, """
        leave 0 -> -
        join 0  -> -
        held    -> 0 waits for 1
        push 1  -> reduce 1, release 0, release 1
    """),
    "gradient of a worker that rejoined counts once: after several pushes":
    ("sync-replicas:aggregate=4", BEGUN_BY_TWO, """
        push 0  -> accumulate 0, release 0
        push 0  -> accumulate 0, release 0
        push 0  -> -
        leave 0 -> -
        join 0  -> -
        leave 1 -> accumulate 0, release 0
        push 0  -> reduce 0, release 0
    """),
    "unfinished step is settled when the policy ends":
    ("sync-replicas:aggregate=5", BEGUN_BY_TWO, """
        push 0  -> accumulate 0, release 0
        push 1  -> accumulate 1, release 1
        push 1  -> accumulate 1, release 1
        push 1  -> -
        leave 0 -> accumulate 1, release 1
        leave 1 -> -
        drain   -> reduce the sum
        drain   -> -
    """),
    "late gradient is not settled when the policy ends":
    ("sync-replicas:aggregate=1", BEGUN_BY_TWO, """
        push 0  -> reduce 0, release 0
        push 1  -> drop 1 stale, release 1
        leave 0 -> -
        leave 1 -> -
        drain   -> -
    """),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "begun", "script"), PLAYS.values(), ids=PLAYS)
def test_events_are_answered_as_in_the_play(spec: str, begun: str, script: str) -> None:
    playing(spec, begun)(script)
