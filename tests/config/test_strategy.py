"""What a job's strategy makes of a cluster, as a table."""

from __future__ import annotations

import pytest

from zmqtrain.config.cluster import Cluster, Role, Task
from zmqtrain.config.strategy import local_ps, member, plan
from zmqtrain.errors import ConfigError

AUTO, PS, MIRRORED = "auto", "parameter-server", "multi-worker-mirrored"
TWO_PS = Cluster(("p:1", "q:1"), workers=3, chief=True)
WORKERS = Cluster((), 2, chief=False, members=("w:1", "v:1"))
LOCAL = Cluster((), workers=2, chief=True)
CHIEF = Cluster((), 2, chief=True, members=("c:1", "w:1", "v:1"))
WITH_PS = Cluster(("p:1",), 2, chief=False, members=("w:1", "v:1"))  # as in a tutorial


@pytest.mark.parametrize(
    ("strategy", "cluster", "planned"),
    [
        (AUTO, TWO_PS, TWO_PS),
        (PS, TWO_PS, TWO_PS),
        (AUTO, WITH_PS, WITH_PS),
        (PS, WITH_PS, WITH_PS),
        (MIRRORED, WITH_PS, Cluster(("w:1", "v:1"), 2, chief=False, hosted=True)),
        (AUTO, WORKERS, Cluster(("w:1", "v:1"), 2, chief=False, hosted=True)),
        (MIRRORED, WORKERS, Cluster(("w:1", "v:1"), 2, chief=False, hosted=True)),
        (AUTO, LOCAL, Cluster(("", ""), 2, chief=True, hosted=True)),
        (AUTO, CHIEF, Cluster(("c:1", "w:1", "v:1"), 3, chief=False, hosted=True)),
        (MIRRORED, TWO_PS, Cluster(("", "", ""), 3, chief=True, hosted=True)),
    ],
)
def test_plan(strategy: str, cluster: Cluster, planned: Cluster) -> None:
    assert plan(strategy, cluster) == planned


@pytest.mark.parametrize(
    ("strategy", "cluster", "told"),
    [
        (PS, WORKERS, "no ps"),
        (AUTO, Cluster((), 3, chief=False, members=("w:1",)), "--workers (or ZMQTRAIN_WORKERS) is"),
        (AUTO, Cluster((), 2, chief=False, members=("w:1", "")), "w:1"),
    ],
)
def test_contradiction_is_told(strategy: str, cluster: Cluster, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(strategy, cluster)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("task", "cluster", "expected"),
    [
        (Task(Role.WORKER, 1), WORKERS, Task(Role.WORKER, 1)),
        (Task(Role.CHIEF, 0), LOCAL, Task(Role.CHIEF, 0)),
        (Task(Role.CHIEF, 0), CHIEF, Task(Role.WORKER, 0)),
        (Task(Role.WORKER, 1), CHIEF, Task(Role.WORKER, 2)),
    ],
)
def test_member(task: Task, cluster: Cluster, expected: Task) -> None:
    assert member(task, cluster) == expected


def test_ps_is_no_member() -> None:
    with pytest.raises(ConfigError, match="ps"):
        member(Task(Role.PS, 0), WITH_PS)


@pytest.mark.parametrize(
    ("strategy", "ps", "count"),
    [(AUTO, None, 1), (AUTO, 0, 0), (AUTO, 2, 2), (PS, None, 1), (MIRRORED, None, 0),
     (MIRRORED, 0, 0)],
)  # fmt: skip
def test_number_of_ps_on_one_host(strategy: str, ps: int | None, count: int) -> None:
    assert local_ps(strategy, ps, workers=3) == count


@pytest.mark.parametrize(("strategy", "ps"), [(PS, 0), (MIRRORED, 2)])
def test_number_of_ps_that_contradicts_the_strategy_is_refused(strategy: str, ps: int) -> None:
    with pytest.raises(ConfigError, match=strategy):
        local_ps(strategy, ps, workers=3)
