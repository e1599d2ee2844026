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


def test_first_step_waits_for_every_expected_worker() -> None:
    playing("sync-replicas")("""
        start 0 3 -> -
        join 2    -> -
        held      -> 2 waits for 0 1
        join 0    -> -
        leave 2   -> -
        join 1    -> -
        held      -> 0 waits for 2, 1 waits for 2
        join 2    -> release 0, release 1, release 2
        held      -> -
    """)


def test_step_is_the_mean_of_one_gradient_a_worker() -> None:
    playing("sync-replicas", BEGUN_BY_THREE)("""
        push 1    -> -
        push 2    -> -
        held      -> 1 waits for 0, 2 waits for 0
        push 0    -> reduce 0 1 2, release 0, release 1, release 2
        push 2    -> -
        push 1    -> -
        push 0    -> reduce 0 1 2, release 0, release 1, release 2
    """)


def test_backup_workers_late_gradients_are_dropped() -> None:
    playing("sync-replicas:aggregate=2", BEGUN_BY_THREE)("""
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
    """)


def test_workers_compute_several_batches_of_a_larger_step() -> None:
    playing("sync-replicas:aggregate=4", BEGUN_BY_TWO)("""
        push 0    -> accumulate 0, release 0
        push 0    -> accumulate 0, release 0
        push 0    -> -
        held      -> 0 waits for 1
        push 1    -> reduce 0 1, release 0, release 1
    """)


@pytest.mark.parametrize(
    ("spec", "script"),
    [
        pytest.param(
            "sync-replicas",
            """
            push 0  -> -
            leave 1 -> reduce 0, release 0
            held    -> -
            """,
            id="before its push",
        ),
        pytest.param(
            "sync-replicas",
            """
            push 0  -> -
            leave 0 -> -
            push 1  -> reduce 0 1, release 1
            push 1  -> reduce 1, release 1
            """,
            id="after its push",
        ),
        pytest.param(
            "sync-replicas",
            """
            leave 0 -> -
            push 1  -> reduce 1, release 1
            """,
            id="all but one",
        ),
        pytest.param(
            "sync-replicas",
            """
            leave 0 -> -
            leave 1 -> -
            join 1  -> release 1
            push 1  -> reduce 1, release 1
            join 0  -> -
            held    -> 0 waits for 1
            push 1  -> reduce 1, release 0, release 1
            """,
            id="the last, before its push",
        ),
        pytest.param(
            "sync-replicas",
            """
            push 0  -> -
            leave 0 -> -
            leave 1 -> reduce 0
            join 0  -> release 0
            push 0  -> reduce 0, release 0
            """,
            id="the last, while another's gradient lies ready",
        ),
        pytest.param(
            "sync-replicas:aggregate=2",
            """
            push 0  -> -
            leave 1 -> accumulate 0, release 0
            push 0  -> reduce 0, release 0
            push 0  -> accumulate 0, release 0
            """,
            id="aggregate, before its push",
        ),
        pytest.param(
            "sync-replicas:aggregate=2",
            """
            push 0  -> -
            leave 0 -> -
            push 1  -> reduce 0 1, release 1
            push 1  -> accumulate 1, release 1
            """,
            id="aggregate, after its push",
        ),
        pytest.param(
            "sync-replicas:aggregate=2",
            """
            push 0  -> -
            leave 0 -> -
            leave 1 -> -
            join 0  -> accumulate 0, release 0
            push 0  -> reduce 0, release 0
            """,
            id="aggregate, everyone",
        ),
    ],
)
def test_worker_that_leaves_releases_the_barrier(spec: str, script: str) -> None:
    playing(spec, BEGUN_BY_TWO)(script)


def test_worker_that_leaves_is_replaced_by_one_that_waits() -> None:
    playing("sync-replicas:aggregate=2", BEGUN_BY_TWO)("""
        join 2  -> -
        push 0  -> -
        held    -> 0 waits for 1, 2 waits for 1
        leave 1 -> release 2
        push 2  -> reduce 0 2, release 0, release 2
    """)


def test_step_does_not_wait_for_a_worker_whose_gradient_will_be_stale() -> None:
    playing("sync-replicas:aggregate=2", BEGUN_BY_THREE)("""
        push 0  -> -
        push 1  -> reduce 0 1, release 0, release 1
        push 0  -> -
        leave 1 -> accumulate 0, release 0
        push 0  -> reduce 0, release 0
        push 2  -> drop 2 stale, release 2
    """)


def test_joiner_takes_part_from_the_next_step_on() -> None:
    playing("sync-replicas", BEGUN_BY_TWO)("""
        push 0  -> -
        join 2  -> -
        held    -> 0 waits for 1, 2 waits for 1
        push 1  -> reduce 0 1, release 0, release 1, release 2
        push 0  -> -
        push 1  -> -
        push 2  -> reduce 0 1 2, release 0, release 1, release 2
    """)


def test_joiners_begin_a_step_together_when_everyone_else_has_left() -> None:
    playing("sync-replicas", BEGUN_BY_TWO)("""
        join 2  -> -
        join 3  -> -
        leave 0 -> -
        leave 1 -> release 2, release 3
        push 2  -> -
        push 3  -> reduce 2 3, release 2, release 3
    """)


def test_joiner_helps_a_step_that_lacks_hands() -> None:
    playing("sync-replicas:aggregate=3", BEGUN_BY_TWO)("""
        join 2  -> release 2
        push 2  -> -
        push 0  -> -
        push 1  -> reduce 0 1 2, release 0, release 1, release 2
    """)


@pytest.mark.parametrize(
    ("spec", "script"),
    [
        pytest.param(
            "sync-replicas",
            """
            push 0  -> -
            leave 0 -> -
            join 0  -> -
            push 1  -> reduce 0 1, release 0, release 1
            """,
            id="after its push",
        ),
        pytest.param(
            "sync-replicas",
            """
            leave 0 -> -
            join 0  -> -
            held    -> 0 waits for 1
            push 1  -> reduce 1, release 0, release 1
            """,
            id="before its push",
        ),
        pytest.param(
            "sync-replicas:aggregate=4",
            """
            push 0  -> accumulate 0, release 0
            push 0  -> accumulate 0, release 0
            push 0  -> -
            leave 0 -> -
            join 0  -> -
            leave 1 -> accumulate 0, release 0
            push 0  -> reduce 0, release 0
            """,
            id="after several pushes",
        ),
    ],
)
def test_gradient_of_a_worker_that_rejoined_counts_once(spec: str, script: str) -> None:
    playing(spec, BEGUN_BY_TWO)(script)


def test_unfinished_step_is_settled_when_the_policy_ends() -> None:
    playing("sync-replicas:aggregate=5", BEGUN_BY_TWO)("""
        push 0  -> accumulate 0, release 0
        push 1  -> accumulate 1, release 1
        push 1  -> accumulate 1, release 1
        push 1  -> -
        leave 0 -> accumulate 1, release 1
        leave 1 -> -
        drain   -> reduce the sum
        drain   -> -
    """)


def test_late_gradient_is_not_settled_when_the_policy_ends() -> None:
    playing("sync-replicas:aggregate=1", BEGUN_BY_TWO)("""
        push 0  -> reduce 0, release 0
        push 1  -> drop 1 stale, release 1
        leave 0 -> -
        leave 1 -> -
        drain   -> -
    """)
