"""Sources of a task's configuration, and refused configurations."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import zmqtrain
from zmqtrain.config.cluster import Cluster, Role, Task
from zmqtrain.config.resolvers import honcho
from zmqtrain.config.task import ROLE, TaskConfig, load_task, role_of_process, role_of_script
from zmqtrain.errors import ConfigError
from zmqtrain.transport.keys import Owner

JOB = {"job": "job.py"}
TF = json.dumps(
    {
        "cluster": {
            "ps": ["p:1", "q:1"],
            "worker": [f"w{i}:1" for i in range(5)],
            "chief": ["c:1"],
        },
        "task": {"type": "worker", "index": 2},
    }
)
MEMBERS = tuple(f"w{i}:1" for i in range(5))
OF_TF: Any = {"workers": 5, "chief": True, "worker_addresses": MEMBERS, "chief_address": "c:1"}
HONCHO = {"HONCHO_PROCESS_NAME": "worker.4"}
LOCAL = tuple(f"127.0.0.1:{port}" for port in range(2222, 2230))


def tf_config(cluster: Mapping[str, Any], **task: Any) -> dict[str, str]:
    document = {"cluster": cluster, "task": task} if task else {"cluster": cluster}
    return {"TF_CONFIG": json.dumps(document)}


def load(
    role: Role = Role.WORKER,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    counts: dict[str, int] | None = None,
) -> TaskConfig:
    """Load a task of job.py in an environment that holds nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(honcho, "running_counts", lambda _: counts)
        return load_task(role, JOB | dict(flags or {}), environ or {})


def test_segments_in_files_are_refused_where_the_system_lacks_their_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    assert load().segment_directory is None
    with pytest.raises(ConfigError, match=r"--segment-dir .* is '/fast', .* Linux; omit it"):
        _ = load(flags={"segment_dir": "/fast"}).segment_directory


COUNTS = {"ps": 3, "worker": 4, "chief": 1}


@pytest.mark.parametrize(
    ("flags", "environ", "index"),
    [
        ({}, {}, 0),
        ({}, HONCHO, 3),
        ({}, HONCHO | {"TF_CONFIG": TF}, 2),
        ({"index": 4}, HONCHO | {"TF_CONFIG": TF}, 4),
        ({"index": None}, HONCHO, 3),
        ({"workers": "5"}, {"JOB_COMPLETION_INDEX": "4"}, 4),
        ({"workers": "5", "index": 1}, {"JOB_COMPLETION_INDEX": "4"}, 1),
        ({"workers": "5"}, {"SLURM_ARRAY_TASK_ID": "3", "SLURM_PROCID": "0"}, 3),
        ({"workers": "5"}, {"SLURM_ARRAY_TASK_ID": "", "SLURM_PROCID": "2"}, 2),
        ({}, HONCHO | {"SLURM_PROCID": "1"}, 3),
    ],
)
def test_index_comes_from_the_first_source_that_has_it(
    flags: dict[str, Any], environ: dict[str, str], index: int
) -> None:
    assert load(flags=flags, environ=environ, counts=COUNTS).task == Task(Role.WORKER, index)


NODE = {
    "JAX_COORDINATOR_ADDRESS": "net-node-0-0.net:29500",
    "JAX_NUM_PROCESSES": "2",
    "JOB_COMPLETION_INDEX": "1",
}
"""Variables of a node of a TrainJob, as a runtime of Kubeflow Trainer sets them."""


def test_nodes_of_a_train_job_are_the_workers_of_a_job_without_ps() -> None:
    config = load(flags={"ps": ()}, environ=NODE)
    assert config.task == Task(Role.WORKER, 1)
    assert config.worker_addresses == ("net-node-0-0.net:2222", "net-node-0-1.net:2222")


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ({"ps": ("a:1",), "workers": "2"}, {}),
        ({"ps": (), "workers": ("a:1", "b:2")}, {}),
        ({"ps": (), "workers": "2"}, {"JAX_COORDINATOR_ADDRESS": "host:29500"}),
        ({"ps": (), "workers": "2"}, {"JAX_NUM_PROCESSES": "two"}),
    ],
)
def test_variables_of_jax_that_name_no_nodes_are_ignored(
    flags: dict[str, Any], changes: dict[str, str]
) -> None:
    config = load(flags=flags, environ=NODE | changes)
    assert "net-node-0-0.net:2222" not in config.worker_addresses


def test_worker_may_join_a_job_that_began_with_fewer() -> None:
    config = load(flags={"workers": 3, "max_workers": 5, "index": 4})
    assert (config.task, config.workers) == (Task(Role.WORKER, 4), 3)


@pytest.mark.parametrize(
    ("flags", "environ", "cluster"),
    [
        ({}, {}, Cluster(LOCAL[:1], workers=1)),
        ({}, {"TF_CONFIG": ""}, Cluster(LOCAL[:1], workers=1)),
        ({}, HONCHO, Cluster(LOCAL[:3], workers=4, chief=True)),
        ({}, HONCHO | {"TF_CONFIG": TF}, Cluster(("p:1", "q:1"), **OF_TF)),
        (
            {"ps": "z:1", "workers": 3},
            {"TF_CONFIG": TF},
            Cluster(("z:1",), **OF_TF | {"workers": 3}),
        ),
        ({"chief": False}, {"TF_CONFIG": TF}, Cluster(("p:1", "q:1"), **OF_TF | {"chief": False})),
        ({"ps": "0", "workers": ("", "")}, {}, Cluster((), workers=2)),
        ({"workers": ("h:1", "i:1")}, {}, Cluster(LOCAL[:1], 2, None, ("h:1", "i:1"))),
        ({"chief": False}, {}, Cluster(LOCAL[:1], workers=1, chief=False)),
        ({"ps": "2"}, {}, Cluster(LOCAL[:2], workers=1)),
        (
            {"ps": "2", "base_port": "7000"},
            {},
            Cluster(("127.0.0.1:7000", "127.0.0.1:7001"), workers=1, base_port=7000),
        ),
        ({"ps": "ipc:///tmp/ps"}, {}, Cluster(("ipc:///tmp/ps",), workers=1)),
        ({"workers": "6"}, HONCHO, Cluster(LOCAL[:3], workers=6, chief=True)),
        ({"ps": "h:1"}, HONCHO, Cluster(("h:1",), workers=4)),
    ],
)
def test_cluster_comes_from_the_first_source_that_has_it(
    flags: dict[str, Any], environ: dict[str, str], cluster: Cluster
) -> None:
    assert load(flags=flags, environ=environ, counts=COUNTS).cluster == cluster


@pytest.mark.parametrize(
    ("counts", "chief"),
    [
        ({"ps": 1, "worker": 4}, False),
        ({"ps": 1, "worker": 4, "chief": 0}, False),
        ({"ps": 1, "worker": 4, "chief": 1}, True),
    ],
)
def test_without_a_chief_under_honcho_worker_0_hosts_it(
    counts: dict[str, int], chief: bool
) -> None:
    assert load(environ=HONCHO, counts=counts).cluster.chief is chief


def test_dynamic_worker_needs_nothing_more() -> None:
    environ = tf_config({"worker": {"3": "w:1"}, "ps": ["p:1", "q:1"]}, type="worker", index=3)
    config = load(environ=environ)
    assert (config.task, config.ps) == (Task(Role.WORKER, 3), ("p:1", "q:1"))
    assert config.cluster.chief is None


def test_ps_among_dynamic_workers_is_given_the_cluster() -> None:
    environ = tf_config({"worker": {}, "ps": ["q:1"]}, type="ps", index=1)
    config = load(Role.PS, {"ps": "p:1,q:1", "workers": 4}, environ)
    assert (config.task, config.ps, config.workers) == (Task(Role.PS, 1), ("p:1", "q:1"), 4)


@pytest.mark.parametrize(
    ("role", "flags", "address"),
    [
        (Role.CHIEF, {}, ("127.0.0.1", 9400)),
        (Role.PS, {"ps": "3", "index": "2"}, ("127.0.0.1", 9412)),
        (Role.WORKER, {"workers": "2", "index": "1"}, ("127.0.0.1", 9451)),
        (Role.WORKER, {"metrics_port": "0", "metrics_host": "0.0.0.0"}, ("0.0.0.0", 0)),
    ],
)
def test_each_task_of_a_host_has_its_own_metrics_port(
    role: Role, flags: dict[str, Any], address: tuple[str, int]
) -> None:
    assert load(role, flags).metrics_address == address


def test_task_trusts_only_its_host_by_default() -> None:
    owner, servers = Owner("worker", 3), {"tcp://127.0.0.1:2222": Owner("ps", 0)}
    local = load(Role.WORKER, {"workers": "4", "index": "3"}).security(owner, servers)
    assert (local.owner, local.servers) == (owner, servers)
    assert (local.directory, local.insecure) == (None, False)
    keyed = load(Role.CHIEF, {"keys": "k", "insecure": True}).security(Owner("chief"), servers)
    assert (keyed.directory, keyed.insecure) == (Path("k"), True)


def test_chief_of_honcho_is_given_and_one_by_default_is_not() -> None:
    counts = {"ps": 0, "worker": 4, "chief": 1}
    worker = load(environ=HONCHO, counts=counts)
    assert (worker.task, worker.cluster.workers) == (Task(Role.WORKER, 3), 4)
    assert worker.cluster.chief is True
    assert load(Role.CHIEF, {"ps": "0"}).cluster.chief is None


def test_certificate_comes_with_its_key() -> None:
    config = load(Role.PS, {"metrics_cert": "c.pem", "metrics_key": "k.pem"})
    assert config.metrics_tls == ("c.pem", "k.pem")
    assert load(Role.PS).metrics_tls is None
    for given, missing in (("cert", "key"), ("key", "cert")):
        with pytest.raises(ConfigError) as caught:
            load(Role.PS, {f"metrics_{given}": "x.pem"})
        assert f"--metrics-{missing}" in str(caught.value)


WRONG: dict[str, tuple[Role, dict[str, Any], dict[str, str], list[str]]] = {
    "no worker at all": (Role.WORKER, {"workers": ()}, {}, ["--workers", "at least 1"]),
    "one address twice": (Role.WORKER, {"ps": "h:1,H:1"}, {}, ["--ps", "h:1"]),
    "worker index": (
        Role.WORKER,
        {"workers": 2, "index": 2},
        {},
        ["--index", "2", "--max-workers"],
    ),
    "worker index beyond the most": (
        Role.WORKER,
        {"workers": 2, "max_workers": 4, "index": 4},
        {},
        ["--index", "at most 3", "--max-workers"],
    ),
    "fewer at most than at first": (
        Role.WORKER,
        {"workers": 3, "max_workers": 2},
        {},
        ["--max-workers", "2", "--workers", "3"],
    ),
    "ps of a cluster without": (Role.PS, {"ps": "0"}, {}, ["--ps", "do not start this task"]),
    "ps index": (Role.PS, {"index": 1}, {}, ["--index", "1", "--ps"]),
    "chief index": (Role.CHIEF, {"index": 1}, {}, ["--index", "1"]),
    "chief that is not to be": (Role.CHIEF, {"chief": False}, {}, ["--chief"]),
    "lease shorter than heartbeats": (
        Role.WORKER,
        {"lease_s": 1.5},
        {},
        ["--lease-s", "1.5", "--heartbeat-s"],
    ),
    "TF_CONFIG of another role": (Role.PS, {}, {"TF_CONFIG": TF}, ["worker 2"]),
    "TF_CONFIG without a task": (
        Role.WORKER,
        {},
        tf_config({"ps": ["p:1"], "worker": ["w:1"]}),
        ["TF_CONFIG", "--index"],
    ),
    "engine's index that is none": (
        Role.WORKER,
        {},
        {"JOB_COMPLETION_INDEX": "two"},
        ["JOB_COMPLETION_INDEX", "--index"],
    ),
    "engine's index that is too large": (
        Role.WORKER,
        {},
        {"SLURM_PROCID": "9" * 5000},
        ["SLURM_PROCID", "--index"],
    ),
    "honcho's name of another role": (Role.PS, {}, HONCHO, ["worker.4", "zmqtrain.roles.worker"]),
    "honcho's name of no role": (
        Role.WORKER,
        {},
        {"HONCHO_PROCESS_NAME": "trainer.2"},
        ["HONCHO_PROCESS_NAME", "--index"],
    ),
}


@pytest.mark.parametrize(("role", "flags", "environ", "told"), WRONG.values(), ids=WRONG)
def test_mistake_is_refused_with_its_option(
    role: Role, flags: dict[str, Any], environ: dict[str, str], told: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(role, flags, environ, COUNTS)
    for text in told:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("role", "counts", "told"),
    [(Role.WORKER, None, "--ps (or ZMQTRAIN_PS) and --workers"), (Role.PS, {"ps": 1}, "--workers")],
)
def test_tasks_that_honcho_does_not_start_have_to_be_given(
    role: Role, counts: dict[str, int] | None, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(role, environ={"HONCHO_PROCESS_NAME": f"{role}.1"}, counts=counts)
    assert told in str(caught.value)


TWO = {"ps": ["p:1"], "worker": ["w:1"]}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, (None, "")),
        (tf_config(TWO, type="ps", index=0), (Role.PS, "TF_CONFIG")),
        (tf_config(TWO, type="worker", index=0), (Role.WORKER, "TF_CONFIG")),
        (tf_config({"master": ["c:1"], **TWO}, type="master", index=0), (Role.CHIEF, "TF_CONFIG")),
        ({ROLE: "ps"}, (Role.PS, ROLE)),
        ({ROLE: " WORKER"}, (Role.WORKER, ROLE)),
        ({ROLE: "master"}, (Role.CHIEF, ROLE)),
        ({ROLE: "ps", **tf_config(TWO, type="worker", index=0)}, (Role.PS, ROLE)),
        ({ROLE: "worker", **tf_config(TWO)}, (Role.WORKER, ROLE)),
        (HONCHO, (Role.WORKER, "HONCHO_PROCESS_NAME")),
        ({"HONCHO_PROCESS_NAME": "train.1"}, (None, "")),
        # One task or none is no cluster, as in TensorFlow.
        ({"TF_CONFIG": "{}"}, (None, "")),
        ({"TF_CONFIG": " "}, (None, "")),
        ({"TF_CONFIG": '{"cluster": {}, "task": {}}'}, (None, "")),
        (tf_config({}, type="worker", index=0), (None, "")),
        (tf_config({"worker": ["w:1"]}, type="worker", index=0), (None, "")),
        (tf_config({"worker": ["w:1"]}), (None, "")),
        (tf_config({"chief": ["c:1"]}, type="chief", index=0), (None, "")),
        (tf_config({}, type="worker", index=1), (Role.WORKER, "TF_CONFIG")),
        (tf_config({}, type="ps", index=0), (Role.PS, "TF_CONFIG")),
        # Variables name the other tasks.
        (
            {"ZMQTRAIN_PS": "p:1", **tf_config({}, type="worker", index=0)},
            (Role.WORKER, "TF_CONFIG"),
        ),
    ],
)
def test_script_is_the_task_that_its_variables_name(
    environ: Mapping[str, str], found: tuple[Role | None, str]
) -> None:
    assert role_of_script(environ) == found


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not valid JSON"),
        (tf_config(TWO), "TF_CONFIG lists a cluster, but this process has no role"),
        (tf_config(TWO, type="worker", index=1), "makes this task worker 1, but its clus"),
        (tf_config(TWO, type="evaluator", index=0), "zmqtrain has none, its chief evaluates"),
        (tf_config(TWO, type="Worker", index=0), 'the task type "Worker"; expected ps, worker'),
        ({ROLE: "Boss"}, "ZMQTRAIN_ROLE is 'Boss'; expected ps, worker or chief"),
        ({ROLE: "evaluator"}, "ZMQTRAIN_ROLE is 'evaluator'; zmqtrain has none, its chief"),
        ({"ZMQTRAIN_INDEX": "1"}, "ZMQTRAIN_INDEX is '1', but this process has no role"),
    ],
)
def test_variables_without_the_task_of_a_script_are_refused(
    environ: Mapping[str, str], told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        role_of_script(environ)


def test_role_of_a_single_worker_of_tf_config_counts_for_a_task() -> None:
    environ = tf_config({"worker": ["w:1"]}, type="worker", index=0)
    assert role_of_process(environ) == (Role.WORKER, "TF_CONFIG")


def test_nothing_else_in_the_package_reads_the_environment() -> None:
    """But for where the user's caches are, and what a compiler and glibc inherit.

    JAX takes the number of its threads from a variable alone, so its adapter sets that.
    """
    package = Path(zmqtrain.__file__).parent
    readers = [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        if re.search(r"\b(os\.environ|getenv)\b", path.read_text())
    ]
    assert set(readers) <= {
        "adapters/jax_memory.py",
        "config/task.py",
        "optim/kernels/cpu.py",
        "optim/kernels/machine_code.py",
        "transport/router_dealer.py",
    }
