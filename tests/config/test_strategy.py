"""What a job's strategy makes of a cluster, as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zmqtrain import Job
from zmqtrain.config.cluster import Cluster, Role, Task
from zmqtrain.config.strategy import (
    instead_of_ps,
    is_mirrored,
    local_ps,
    member,
    plan,
    strategy_of,
    with_exchange,
)
from zmqtrain.data import Arrays
from zmqtrain.errors import ConfigError
from zmqtrain.models import MLP
from zmqtrain.optim import LAMB, SGD

AUTO, PS, MULTI, MIRRORED = "auto", "parameter-server", "multi-worker-mirrored", "mirrored"
TWO_PS = Cluster(("p:1", "q:1"), workers=3, chief=True)
WORKERS = Cluster((), 2, chief=False, members=("w:1", "v:1"))
ONE_WORKER = Cluster(("p:1",), workers=1, chief=True)  # what flags give by default
LOCAL = Cluster((), workers=2, chief=True)
CHIEF = Cluster((), 2, chief=True, members=("w:1", "v:1"), chief_address="c:1")
WITH_PS = Cluster(("p:1",), 2, chief=False, members=("w:1", "v:1"))  # as in a tutorial


@pytest.mark.parametrize(
    ("strategy", "cluster", "planned"),
    [
        (AUTO, TWO_PS, TWO_PS),
        (PS, TWO_PS, TWO_PS),
        (AUTO, WITH_PS, WITH_PS),
        (PS, WITH_PS, WITH_PS),
        (MULTI, WITH_PS, Cluster(("w:1", "v:1"), 2, chief=False, hosted=True)),
        (AUTO, WORKERS, Cluster(("w:1", "v:1"), 2, chief=False, hosted=True)),
        (MULTI, WORKERS, Cluster(("w:1", "v:1"), 2, chief=False, hosted=True)),
        (AUTO, LOCAL, Cluster(("", ""), 2, chief=True, hosted=True)),
        (AUTO, CHIEF, Cluster(("c:1", "w:1", "v:1"), 3, chief=False, hosted=True)),
        (MULTI, TWO_PS, Cluster(("", "", ""), 3, chief=True, hosted=True)),
        (MIRRORED, ONE_WORKER, Cluster(("",), 1, chief=True, hosted=True)),
    ],
)
def test_plan(strategy: str, cluster: Cluster, planned: Cluster) -> None:
    assert plan(strategy, cluster) == planned


@pytest.mark.parametrize(
    ("strategy", "cluster", "told"),
    [
        (PS, WORKERS, "no ps"),
        (MIRRORED, WORKERS, "expected 1"),
        (AUTO, Cluster((), 3, chief=False, members=("w:1",)), "--workers (or ZMQTRAIN_WORKERS) is"),
        (AUTO, Cluster((), 2, chief=False, members=("w:1", "")), "w:1"),
        (AUTO, replace(CHIEF, workers=3), "--workers (or ZMQTRAIN_WORKERS) is 3"),
        (AUTO, Cluster((), 2, chief=False, members=("w:1", "w:1")), "--workers (or ZMQTRAIN_WORK"),
        (AUTO, replace(CHIEF, chief_address="v:1"), "lists v:1 twice"),
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


@pytest.mark.parametrize(
    ("cluster", "can"), [(WITH_PS, True), (plan(MULTI, WITH_PS), False), (TWO_PS, False)]
)
def test_workers_with_addresses_can_do_without_a_ps(cluster: Cluster, can: bool) -> None:
    assert (f"--strategy {MULTI}" in instead_of_ps(cluster)) == can


def test_ps_is_no_member() -> None:
    with pytest.raises(ConfigError, match="ps"):
        member(Task(Role.PS, 0), WITH_PS)


@pytest.mark.parametrize(
    ("strategy", "ps", "count"),
    [(AUTO, None, 1), (AUTO, 0, 0), (AUTO, 2, 2), (PS, None, 1), (MULTI, None, 0),
     (MULTI, 0, 0)],
)  # fmt: skip
def test_number_of_ps_on_one_host(strategy: str, ps: int | None, count: int) -> None:
    assert local_ps(strategy, ps, workers=3) == count


@pytest.mark.parametrize(("strategy", "ps"), [(PS, 0), (MULTI, 2)])
def test_number_of_ps_that_contradicts_the_strategy_is_refused(strategy: str, ps: int) -> None:
    with pytest.raises(ConfigError, match=strategy):
        local_ps(strategy, ps, workers=3)


@pytest.mark.parametrize(
    ("fields", "alone", "mirrored"),
    [
        ({}, True, False),
        ({"devices": "cpu:0,cpu:1"}, True, True),
        ({"devices": "cpu:0,cpu:1"}, False, False),
        ({"devices": "cpu:0,cpu:1", "strategy": MIRRORED}, False, True),
        ({"devices": "cpu:0,cpu:1", "strategy": PS}, True, False),
    ],
)
def test_devices_are_mirrored_unless_a_cluster_is_given(
    fields: dict[str, Any], alone: bool, mirrored: bool
) -> None:
    assert is_mirrored(job(**fields), alone=alone) == mirrored


@pytest.mark.parametrize(
    ("devices", "workers", "hosted", "strategy"),
    [
        ("", 1, True, MULTI),
        ("", 2, False, PS),
        ("gpu:0,gpu:1", 1, True, MIRRORED),
        ("gpu:0,gpu:1", 2, True, MULTI),
        ("gpu:0,gpu:1", 1, False, PS),
    ],
)
def test_strategy_of_a_run(devices: str, workers: int, hosted: bool, strategy: str) -> None:
    assert strategy_of(job(devices=devices), workers, hosted=hosted) == strategy


HOSTED = Cluster(("", ""), 2, chief=True, hosted=True)
ONE_PS = Cluster(("ipc:///tmp/ps-0",), 2, chief=True)
FAR = Cluster(("127.0.0.1:1", "b:1"), 2, chief=True, hosted=True)
THREE = Cluster(("a:1", "b:1", "c:1"), 3, chief=True, hosted=True)


def job(**fields: Any) -> Job:
    rows = np.zeros((4, 2), np.float32)
    defaults = {"model": MLP(2, 2, 2), "data": Arrays((rows,), (rows,)), "optimizer": SGD(0.1)}
    return Job(**defaults | fields)


@pytest.mark.parametrize(
    ("cluster", "fields"),
    [
        (HOSTED, {}),
        (HOSTED, {"exchange": "board"}),
        (HOSTED, {"policy": "sync-replicas:aggregate=2"}),
        (replace(HOSTED, ps=("127.0.0.1:1", "localhost:2")), {}),
        (ONE_PS, {"exchange": "board", "policy": "sync-replicas"}),
    ],
)
def test_workers_share_a_board_of_one_ps(cluster: Cluster, fields: dict[str, Any]) -> None:
    found = with_exchange(cluster, job(**fields))
    assert found == replace(cluster, ps=cluster.ps[:1], board=True)


OBSTACLES: dict[str, tuple[Cluster, dict[str, Any], dict[str, Any]]] = {
    "policy": (HOSTED, {"policy": "hogwild"}, {}),
    "tokens": (HOSTED, {"policy": "sync-replicas:aggregate=1,tokens=2"}, {}),
    "whole variables": (HOSTED, {"optimizer": LAMB(0.1)}, {}),
    "consistent_reads": (HOSTED, {"consistent_reads": True}, {}),
    "lane": (HOSTED, {}, {"lane": "tcp"}),
    "crash_safe": (HOSTED, {}, {"crash_safe": False}),
    "b:1": (FAR, {}, {}),
    "2 ps": (replace(ONE_PS, ps=("", "")), {"policy": "sync-replicas"}, {}),
    "hogwild": (ONE_PS, {}, {}),
}


@pytest.mark.parametrize("told", OBSTACLES)
def test_cluster_that_cannot_share_a_board_exchanges_messages_or_says_why(told: str) -> None:
    cluster, fields, flags = OBSTACLES[told]
    assert with_exchange(cluster, job(**fields), **flags) == cluster
    with pytest.raises(ConfigError) as caught:
        with_exchange(cluster, job(exchange="board", **fields), **flags)
    assert told in str(caught.value)


def test_one_owner_of_everything_is_a_worker_or_the_only_ps() -> None:
    assert with_exchange(HOSTED, job(exchange="to-one")) == HOSTED
    assert with_exchange(ONE_PS, job(exchange="to-one")) == ONE_PS
    with pytest.raises(ConfigError, match="to-one, but there are 2 ps"):
        with_exchange(replace(ONE_PS, ps=("", "")), job(exchange="to-one"))


@pytest.mark.parametrize(
    ("cluster", "fields", "told"),
    [
        (ONE_PS, {"copies": 2}, "copies .* is 2, but there are ps; .* --ps 0"),
        (ONE_PS, {"exchange": "one-shot"}, "exchange .* is one-shot, but there are ps"),
        (HOSTED, {"copies": 3}, "copies .* is 3, but there are 2 workers"),
        (HOSTED, {"copies": 2, "exchange": "board"}, "is board, but copies is 2"),
        (HOSTED, {"copies": 2, "policy": "hogwild"}, "each part decides alone .*hogwild:whole"),
        (HOSTED, {"copies": 2, "compression": "int8"}, "compression is int8"),
        (HOSTED, {"copies": 2, "ps_device": "gpu"}, "ps_device is gpu"),
        (THREE, {"copies": 2, "optimizer": LAMB(0.1)}, "whole variables, .* to-one"),
    ],
)
def test_copies_that_would_differ_or_have_no_place_are_refused(
    cluster: Cluster, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        with_exchange(cluster, job(partition_nbytes=4, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"copies": 2},
        {"copies": 3, "policy": "bounded-staleness:1"},
        {"copies": 2, "exchange": "to-one", "optimizer": LAMB(0.1)},
        {"exchange": "one-shot", "optimizer": LAMB(0.1)},
    ],
)
def test_workers_hold_copies_of_parts_and_exchange_messages(fields: dict[str, Any]) -> None:
    assert with_exchange(THREE, job(partition_nbytes=4, **fields)) == THREE
