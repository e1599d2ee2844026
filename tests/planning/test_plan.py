"""Plans for jobs and clusters, as tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zmqtrain import Job
from zmqtrain.config.cluster import Cluster, Role, Task
from zmqtrain.data import Arrays
from zmqtrain.errors import ConfigError
from zmqtrain.models import MLP
from zmqtrain.optim import LAMB, SGD, Adafactor, Muon
from zmqtrain.planning.plan import Plan, plan_alone, plan_for
from zmqtrain.planning.strategy import is_mirrored, local_cluster, task_under
from zmqtrain.transport.keys import Owner

AUTO, PS, MULTI, MIRRORED = "auto", "parameter-server", "multi-worker-mirrored", "mirrored"
PORTS = ("127.0.0.1:2222", "127.0.0.1:2223", "127.0.0.1:2224")
TWO_PS = Cluster(("p:1", "q:1"), workers=3)
WORKERS = Cluster((), 2, worker_addresses=("w:1", "v:1"))
ONE_WORKER = Cluster(("p:1",), workers=1)  # what flags give by default
LOCAL = Cluster((), workers=2, chief=True)
CHIEF = Cluster((), 2, chief=True, worker_addresses=("w:1", "v:1"), chief_address="c:1")
WITH_PS = Cluster(("p:1",), 2, chief=False, worker_addresses=("w:1", "v:1"))  # as in a tutorial
THREE = Cluster((), 3, worker_addresses=("a:1", "b:1", "c:1"))
ONE_PS = Cluster(("ipc:///tmp/ps-0",), 2)
NEAR_PS = replace(ONE_PS, ps=("ipc:///tmp/ps-0", "ipc:///tmp/ps-1"))
BIASES = {"*bias*": {"optimizer": SGD(0.1)}}
SPREAD = {"exchange": "direct", "partition_nbytes": 4}


def job(**fields: Any) -> Job:
    rows = np.zeros((4, 2), np.float32)
    defaults = {"model": MLP(2, 2, 2), "data": Arrays((rows,), (rows,)), "optimizer": SGD(0.1)}
    return Job(**defaults | fields)


@pytest.mark.parametrize(
    ("strategy", "cluster", "ps", "workers", "has_chief", "found"),
    [
        (AUTO, TWO_PS, TWO_PS.ps, 3, True, PS),
        (PS, TWO_PS, TWO_PS.ps, 3, True, PS),
        (AUTO, WITH_PS, ("p:1",), 2, False, PS),
        (MULTI, WITH_PS, ("w:1", "v:1"), 2, False, MULTI),
        (AUTO, WORKERS, ("w:1", "v:1"), 2, False, MULTI),
        (AUTO, LOCAL, PORTS[:2], 2, True, MULTI),
        (AUTO, replace(LOCAL, base_port=2223), PORTS[1:], 2, True, MULTI),
        (AUTO, CHIEF, ("c:1", "w:1", "v:1"), 3, False, MULTI),
        (MULTI, TWO_PS, PORTS, 3, False, MULTI),
        (MULTI, ONE_WORKER, PORTS[:1], 1, False, MULTI),
    ],
)
def test_strategy_decides_which_tasks_hold_shards(
    strategy: str, cluster: Cluster, ps: tuple[str, ...], workers: int, has_chief: bool, found: str
) -> None:
    plan = plan_for(job(strategy=strategy, **SPREAD), cluster)
    assert (plan.ps, plan.workers, plan.has_chief, plan.strategy) == (ps, workers, has_chief, found)
    assert plan.members == (() if found == PS else tuple(range(workers)))


@pytest.mark.parametrize(
    ("strategy", "cluster", "told"),
    [
        (PS, WORKERS, "no ps"),
        (MIRRORED, WORKERS, "expected 1"),
        (AUTO, replace(WORKERS, workers=3), "--workers (or ZMQTRAIN_WORKERS) is 3"),
        (AUTO, replace(WORKERS, worker_addresses=("w:1", "")), "w:1"),
        (AUTO, replace(CHIEF, workers=3), "--workers (or ZMQTRAIN_WORKERS) is 3"),
        (AUTO, replace(WORKERS, worker_addresses=("w:1", "w:1")), "lists w:1 twice"),
        (AUTO, replace(CHIEF, chief_address="v:1"), "lists v:1 twice"),
    ],
)
def test_cluster_that_contradicts_the_strategy_is_refused(
    strategy: str, cluster: Cluster, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        task_under(strategy, Task(Role.WORKER, 0), cluster)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("task", "cluster", "expected"),
    [
        (Task(Role.WORKER, 1), WORKERS, Task(Role.WORKER, 1)),
        (Task(Role.CHIEF, 0), LOCAL, Task(Role.CHIEF, 0)),
        (Task(Role.CHIEF, 0), CHIEF, Task(Role.WORKER, 0)),
        (Task(Role.WORKER, 1), CHIEF, Task(Role.WORKER, 2)),
        (Task(Role.PS, 0), WITH_PS, Task(Role.PS, 0)),
    ],
)
def test_chief_of_tf_config_is_the_first_worker_without_ps(
    task: Task, cluster: Cluster, expected: Task
) -> None:
    assert task_under(AUTO, task, cluster) == expected


@pytest.mark.parametrize(
    ("task", "cluster", "told"),
    [(Task(Role.PS, 0), WITH_PS, "ps"), (Task(Role.CHIEF, 0), WORKERS, "--chief")],
)
def test_task_that_workers_host_is_not_started(task: Task, cluster: Cluster, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        task_under(MULTI, task, cluster)


@pytest.mark.parametrize(
    ("strategy", "cluster", "can"), [(AUTO, WITH_PS, True), (MULTI, WITH_PS, False),
     (AUTO, TWO_PS, False)],
)  # fmt: skip
def test_workers_with_addresses_can_do_without_a_ps(
    strategy: str, cluster: Cluster, can: bool
) -> None:
    assert (MULTI in plan_for(job(strategy=strategy), cluster).remedy) == can


@pytest.mark.parametrize(
    ("strategy", "ps", "count"),
    [(AUTO, None, 1), (AUTO, 0, 0), (AUTO, 2, 2), (PS, None, 1), (MULTI, None, 0), (MULTI, 0, 0)],
)
def test_local_cluster_has_the_ps_that_its_strategy_needs(
    strategy: str, ps: int | None, count: int
) -> None:
    cluster = local_cluster(strategy, ps, 3, lambda index: f"ipc://{index}")
    assert len(cluster.ps) == count
    assert (cluster.ps or cluster.worker_addresses)[0] == "ipc://0"


@pytest.mark.parametrize(("strategy", "ps"), [(PS, 0), (MULTI, 2)])
def test_number_of_ps_that_contradicts_the_strategy_is_refused(strategy: str, ps: int) -> None:
    with pytest.raises(ConfigError, match=strategy):
        local_cluster(strategy, ps, 3)


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
    ("devices", "cluster", "strategy"),
    [
        ("", Cluster((), 1), MULTI),
        ("gpu:0,gpu:1", Cluster((), 1), MIRRORED),
        ("gpu:0,gpu:1", Cluster((), 2), MULTI),
        ("gpu:0,gpu:1", ONE_WORKER, PS),
    ],
)
def test_one_worker_with_devices_is_mirrored(devices: str, cluster: Cluster, strategy: str) -> None:
    assert plan_for(job(devices=devices), cluster).strategy == strategy


@pytest.mark.parametrize(
    ("cluster", "policy", "placement"),
    [(TWO_PS, "hogwild", "greedy"), (WORKERS, "sync-replicas", "contiguous")],
)
def test_policy_and_placement_have_other_defaults_on_workers(
    cluster: Cluster, policy: str, placement: str
) -> None:
    planned = plan_for(job(), cluster).job
    assert (planned.policy, planned.placement) == (policy, placement)
    given = plan_for(job(policy="hogwild", placement="greedy"), cluster).job
    assert (given.policy, given.placement) == ("hogwild", "greedy")
    assert plan_for(job(overlap=True), cluster).job.placement == "greedy"


@pytest.mark.parametrize(
    ("partition_nbytes", "shards"), [(0, 3), (1, 3), (300, 2), (500, 1), (10**6, 1)]
)
def test_worker_holds_a_shard_of_some_size_or_none(partition_nbytes: int, shards: int) -> None:
    model = MLP(features=4, hidden=30, classes=2)  # 848 bytes
    plan = plan_for(job(model=model, partition_nbytes=partition_nbytes), THREE)
    assert (plan.shards, plan.hosts) == (shards, tuple(range(shards)))
    tasks = [Task(Role.WORKER, index) for index in range(3)]
    assert [plan.shard_of(task) is not None for task in tasks] == [i < shards for i in range(3)]


@pytest.mark.parametrize(
    ("cluster", "fields"),
    [
        (LOCAL, {}),
        (LOCAL, {"exchange": "board"}),
        (LOCAL, {"policy": "sync-replicas:aggregate=2"}),
        (replace(LOCAL, worker_addresses=("127.0.0.1:1", "localhost:2")), {}),
        (ONE_PS, {"exchange": "board", "policy": "sync-replicas"}),
    ],
)
def test_workers_share_a_board_of_one_shard(cluster: Cluster, fields: dict[str, Any]) -> None:
    plan = plan_for(job(**fields), cluster)
    assert (plan.exchange.name, plan.shards, plan.copies) == ("board", 1, 1)


OBSTACLES: dict[str, tuple[Cluster, dict[str, Any], dict[str, Any]]] = {
    "policy": (LOCAL, {"policy": "hogwild"}, {}),
    "tokens": (LOCAL, {"policy": "sync-replicas:aggregate=1,tokens=2"}, {}),
    "whole variables": (LOCAL, {"optimizer": LAMB(0.1)}, {}),
    "consistent_reads": (LOCAL, {"consistent_reads": True}, {}),
    "lane": (LOCAL, {}, {"lane": "tcp"}),
    "crash_safe": (LOCAL, {}, {"crash_safe": False}),
    "b:1": (replace(LOCAL, worker_addresses=("127.0.0.1:1", "b:1")), {}, {}),
    "2 ps": (NEAR_PS, {"policy": "sync-replicas"}, {}),
    "hogwild": (ONE_PS, {}, {}),
    "copies is 2, ": (LOCAL, {"copies": 2}, {}),
}


@pytest.mark.parametrize("told", OBSTACLES)
def test_cluster_that_cannot_share_a_board_exchanges_messages_or_is_refused(told: str) -> None:
    cluster, fields, flags = OBSTACLES[told]
    assert plan_for(job(**fields), cluster, **flags).exchange.name == "direct"
    with pytest.raises(ConfigError) as caught:
        plan_for(job(exchange="board", **fields), cluster, **flags)
    assert told.rstrip(", ") in str(caught.value)


@pytest.mark.parametrize("fields", [{}, {"placement": "contiguous"}], ids=str)
@pytest.mark.parametrize("rule", [LAMB(0.1), Adafactor(0.1), Muon(), SGD(0.1)], ids=repr)
def test_variable_that_its_rule_looks_at_as_a_whole_is_not_cut(
    rule: Any, fields: dict[str, Any]
) -> None:
    groups = {"*bias*": {"optimizer": SGD(0.1)}}
    own = job(model=MLP(20, 20, 2), optimizer=rule, groups=groups, partition_nbytes=16, **fields)
    slices = [cut for layout in plan_for(own, TWO_PS).layouts for cut in layout.slices]
    are_whole = all(cut.rows == cut.variable.shape[0] for cut in slices if len(cut.shape) > 1)
    assert are_whole == (rule != SGD(0.1))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"optimizer": Muon()}, r"would train '.*bias.*' of shape \(2,\); .*groups="),
        ({"optimizer": Muon(), "l2": 0.1, "groups": BIASES}, "has l2=0.1 and Muon.*weight_decay"),
        ({"inner": Muon(), "policy": "local-steps:5"}, r"of shape \(2,\); expected a matrix"),
    ],
)
def test_variable_that_muon_cannot_train_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan_for(job(**fields), LOCAL)


def test_one_holder_of_everything_is_a_worker_or_the_only_ps() -> None:
    assert plan_for(job(exchange="to-one"), LOCAL).hosts == (0,)
    assert plan_for(job(exchange="to-one"), ONE_PS).ps == ONE_PS.ps
    with pytest.raises(ConfigError, match="to-one, but there are 2 ps"):
        plan_for(job(exchange="to-one"), NEAR_PS)


@pytest.mark.parametrize(
    ("cluster", "fields", "told"),
    [
        (ONE_PS, {"copies": 2}, "copies .* is 2, but there are ps; .*--ps 0"),
        (ONE_PS, {"exchange": "one-shot"}, "exchange .* is one-shot, but there are ps"),
        (LOCAL, {"copies": 3}, "copies .* is 3, but there are 2 workers"),
        (LOCAL, {"copies": 2, "exchange": "board"}, "is board, but copies is 2"),
        (LOCAL, {"copies": 2, "policy": "hogwild"}, "each part decides alone .*hogwild:whole"),
        (LOCAL, {"copies": 2, "compression": "int8"}, "compression is int8"),
        (LOCAL, {"copies": 2, "ps_device": "gpu"}, "ps_device is gpu"),
    ],
)
def test_copies_that_would_differ_or_lack_a_worker_are_refused(
    cluster: Cluster, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        plan_for(job(partition_nbytes=4, **fields), cluster)


@pytest.mark.parametrize(
    ("fields", "shards", "copies"),
    [
        ({"copies": 2}, 3, 2),
        ({"copies": 3, "policy": "bounded-staleness:1"}, 3, 3),
        ({"copies": 2, "exchange": "to-one"}, 2, 2),
        ({"exchange": "one-shot"}, 3, 3),
    ],
)
def test_workers_hold_copies_and_exchange_messages(
    fields: dict[str, Any], shards: int, copies: int
) -> None:
    plan = plan_for(job(partition_nbytes=4, **fields), THREE)
    assert (plan.shards, plan.copies, len(plan.layouts)) == (shards, copies, shards)
    assert not plan.exchange.is_board


def test_later_group_has_its_own_shards_and_its_first_worker_hosts_the_chief() -> None:
    plan = plan_for(job(partition_nbytes=4), THREE)
    later = plan.in_group(2, (1, 2))
    assert (later.ps, later.hosts, later.workers) == (("b:1", "c:1"), (1, 2), 2)
    assert [later.hosts_chief(Task(Role.WORKER, index)) for index in range(3)] == [
        False,
        True,
        False,
    ]
    assert later.shard_of(Task(Role.WORKER, 2)) == 1
    assert later.most_workers == 3
    assert later.among_workers().ps == THREE.worker_addresses


@pytest.mark.parametrize(
    ("task", "owner"),
    [
        (("ps", 0), Owner("worker", 1)),
        (("ps", 1), Owner("worker", 2)),
        (("ps", 2), Owner("ps", 2)),
        (("chief", 0), Owner("worker", 1)),
        (("worker", 0), Owner("worker", 0)),
    ],
)
def test_ps_and_chief_on_a_worker_have_its_key(task: tuple[str, int], owner: Owner) -> None:
    plan = plan_for(job(partition_nbytes=4), THREE).in_group(2, (1, 2))
    assert plan.owner_of(*task) == owner


def test_workers_without_ps_must_agree_on_their_number() -> None:
    def fingerprint(cluster: Cluster) -> dict[str, str]:
        return plan_for(job(), cluster).fingerprint()

    assert fingerprint(replace(LOCAL, workers=3)) == fingerprint(LOCAL) | {"workers": "3"}
    assert fingerprint(replace(TWO_PS, workers=2)) == fingerprint(TWO_PS)


def tasks_of(plan: Plan) -> list[str]:
    return list(map(str, plan.tasks))


def test_plan_lists_the_tasks_that_are_started() -> None:
    assert tasks_of(plan_for(job(), replace(TWO_PS, workers=1))) == [
        *("chief 0", "ps 0", "ps 1", "worker 0")
    ]
    assert tasks_of(plan_for(job(), WORKERS)) == ["worker 0", "worker 1"]


class Summed(MLP):
    loss_adds_up = True


def test_loss_that_adds_up_is_for_one_worker_or_policies_without_a_mean() -> None:
    model = Summed(2, 2, 2)
    assert plan_for(job(model=model), replace(LOCAL, workers=1)).workers == 1
    assert plan_for(job(model=model), TWO_PS).job.policy == "hogwild"
    with pytest.raises(ConfigError, match=r"adds up .* 2 workers, .* 2 times too small"):
        plan_for(job(model=model), LOCAL)


@pytest.mark.parametrize(
    ("cluster", "task", "hosts"),
    [
        (TWO_PS, Task(Role.CHIEF, 0), True),
        (TWO_PS, Task(Role.WORKER, 0), False),
        (WITH_PS, Task(Role.WORKER, 0), True),
        (WITH_PS, Task(Role.WORKER, 1), False),
        (WITH_PS, Task(Role.PS, 0), False),
        (WORKERS, Task(Role.WORKER, 0), True),
        (LOCAL, Task(Role.WORKER, 0), False),
    ],
)
def test_one_task_hosts_the_chief(cluster: Cluster, task: Task, hosts: bool) -> None:
    assert plan_for(job(), cluster).hosts_chief(task) is hosts


@pytest.mark.parametrize(
    "fields", [{"inner_state": "keep", "policy": "local-steps:4"}, {"upload": "s3://bucket/net"}]
)
def test_logdir_that_an_option_needs_may_be_given_on_the_command_line(
    fields: dict[str, Any],
) -> None:
    (name, *_) = fields
    in_file = job(**fields)
    with pytest.raises(ConfigError, match=rf"{name} is '.*has no logdir.*give --logdir \(or "):
        plan_alone(in_file)
    assert plan_alone(in_file.with_overrides(logdir="runs/net")).job.logdir == "runs/net"
