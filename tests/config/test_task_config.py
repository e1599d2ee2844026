"""Where a task's configuration comes from, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import zmqtrain
from zmqtrain.config.cluster import Cluster, Role, Task
from zmqtrain.config.task import TaskConfig, load_overrides, load_task
from zmqtrain.config.timing import Timing
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
    return load_task(role, JOB | dict(flags or {}), environ or {}, lambda _: counts)


COUNTS = {"ps": 3, "worker": 4, "chief": 1}


@pytest.mark.parametrize(
    ("flags", "environ", "index"),
    [
        ({}, {}, 0),
        ({}, HONCHO, 3),
        ({}, HONCHO | {"TF_CONFIG": TF}, 2),
        ({}, HONCHO | {"TF_CONFIG": TF, "ZMQTRAIN_INDEX": "1"}, 1),
        ({"index": "4"}, HONCHO | {"TF_CONFIG": TF, "ZMQTRAIN_INDEX": "1"}, 4),
        ({"index": "0"}, {"ZMQTRAIN_INDEX": "1", "ZMQTRAIN_WORKERS": "2"}, 0),
        ({"index": None}, {"ZMQTRAIN_INDEX": "1", "ZMQTRAIN_WORKERS": "2"}, 1),
        ({}, {"ZMQTRAIN_INDEX": ""}, 0),
    ],
)
def test_index_comes_from_the_first_source_that_says_it(
    flags: dict[str, Any], environ: dict[str, str], index: int
) -> None:
    assert load(flags=flags, environ=environ, counts=COUNTS).task == Task(Role.WORKER, index)


@pytest.mark.parametrize(
    ("flags", "environ", "cluster"),
    [
        ({}, {}, Cluster(LOCAL[:1], workers=1, chief=True)),
        ({}, {"TF_CONFIG": ""}, Cluster(LOCAL[:1], workers=1, chief=True)),
        ({}, HONCHO, Cluster(LOCAL[:3], workers=4, chief=True)),
        ({}, HONCHO | {"TF_CONFIG": TF}, Cluster(("p:1", "q:1"), workers=5, chief=True)),
        (
            {},
            {"TF_CONFIG": TF, "ZMQTRAIN_PS": "x:1, y:2", "ZMQTRAIN_WORKERS": "9"},
            Cluster(("x:1", "y:2"), workers=9, chief=True),
        ),
        (
            {"ps": "z:1", "workers": "3"},
            {"TF_CONFIG": TF, "ZMQTRAIN_PS": "x:1", "ZMQTRAIN_WORKERS": "9"},
            Cluster(("z:1",), workers=3, chief=True),
        ),
        ({"chief": False}, {"TF_CONFIG": TF}, Cluster(("p:1", "q:1"), workers=5, chief=False)),
        ({}, {"ZMQTRAIN_CHIEF": "false"}, Cluster(LOCAL[:1], workers=1, chief=False)),
        (
            {"chief": True},
            {"ZMQTRAIN_CHIEF": "0"},
            Cluster(LOCAL[:1], workers=1, chief=True),
        ),
        ({"ps": "2"}, {}, Cluster(LOCAL[:2], workers=1, chief=True)),
        (
            {"ps": "2", "base_port": "7000"},
            {},
            Cluster(("127.0.0.1:7000", "127.0.0.1:7001"), workers=1, chief=True),
        ),
        ({"ps": "ipc:///tmp/ps"}, {}, Cluster(("ipc:///tmp/ps",), workers=1, chief=True)),
        ({"workers": "6"}, HONCHO, Cluster(LOCAL[:3], workers=6, chief=True)),
        ({"ps": "h:1"}, HONCHO, Cluster(("h:1",), workers=4, chief=True)),
    ],
)
def test_cluster_comes_from_the_first_source_that_says_it(
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


def test_ps_elsewhere_leaves_room_for_a_chief_elsewhere() -> None:
    config = load(flags={"ps": "h:1"}, environ=HONCHO, counts={"worker": 4})
    assert config.cluster == Cluster(("h:1",), workers=4, chief=True)


def test_honcho_is_not_asked_when_nothing_is_left_to_ask() -> None:
    config = load(flags={"ps": "h:1", "workers": "4"}, environ=HONCHO, counts=None)
    assert config.task == Task(Role.WORKER, 3)


def test_dynamic_workers_are_completed_by_variables() -> None:
    environ = tf_config({"worker": {}, "ps": ["q:1"]}, type="ps", index=1) | {
        "ZMQTRAIN_PS": "p:1,q:1",
        "ZMQTRAIN_WORKERS": "4",
        "ZMQTRAIN_CHIEF": "1",
    }
    config = load(Role.PS, environ=environ)
    assert (config.task, config.cluster) == (Task(Role.PS, 1), Cluster(("p:1", "q:1"), 4, True))


@pytest.mark.parametrize(
    ("role", "flags", "host"),
    [
        (Role.CHIEF, {}, True),
        (Role.WORKER, {}, False),
        (Role.WORKER, {"chief": False}, True),
        (Role.WORKER, {"chief": False, "workers": "2", "index": "1"}, False),
        (Role.PS, {"chief": False}, False),
    ],
)
def test_one_task_hosts_the_chief(role: Role, flags: dict[str, Any], host: bool) -> None:
    assert load(role, flags).hosts_chief is host


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


def test_task_trusts_its_host_unless_it_is_told_otherwise() -> None:
    local = load(Role.WORKER, {"ps": "2", "workers": "4", "index": "3"}).security
    assert (local.owner, local.directory, local.insecure) == (Owner("worker", 3), None, False)
    assert local.servers == {
        "tcp://127.0.0.1:2222": Owner("ps", 0),
        "tcp://127.0.0.1:2223": Owner("ps", 1),
    }
    keyed = load(Role.CHIEF, {"keys": "k"}, {"ZMQTRAIN_KEYS": "l", "ZMQTRAIN_INSECURE": "1"})
    assert (keyed.security.owner, keyed.security.directory) == (Owner("chief"), Path("k"))
    assert keyed.security.insecure


def test_certificate_comes_with_its_key() -> None:
    config = load(Role.PS, {"metrics_cert": "c.pem"}, {"ZMQTRAIN_METRICS_KEY": "k.pem"})
    assert config.metrics_tls == ("c.pem", "k.pem")
    assert load(Role.PS).metrics_tls is None
    for given, missing in (("cert", "key"), ("key", "cert")):
        with pytest.raises(ConfigError) as caught:
            load(Role.PS, {f"metrics_{given}": "x.pem"})
        assert str(caught.value) == (
            f"--metrics-{given} (or ZMQTRAIN_METRICS_{given.upper()}) is given, but not "
            f"--metrics-{missing} (or ZMQTRAIN_METRICS_{missing.upper()}); expected both or none; "
            "give the other one, too"
        )


def test_ps_binds_its_own_address() -> None:
    assert load(Role.PS, {"ps": "2", "index": "1"}).bind_endpoint == "tcp://127.0.0.1:2223"
    assert load(Role.PS, {"ps": "h:1"}).bind_endpoint == "tcp://0.0.0.0:1"
    assert load(Role.PS, {"ps": "h:1", "bind": "eth0"}).bind_endpoint == "tcp://eth0:1"


def test_worker_binds_nothing() -> None:
    with pytest.raises(ConfigError) as caught:
        _ = load().bind_endpoint
    assert str(caught.value) == "worker 0 binds no socket; only ps tasks do"


WRONG: dict[str, tuple[Role, dict[str, Any], dict[str, str], dict[str, int] | None, str]] = {
    "no job": (
        Role.WORKER,
        {"job": None},
        {},
        None,
        (
            "--job (or ZMQTRAIN_JOB) is not given; expected the job: file.py, file.py:name or "
            "package.module:name; give one of the two"
        ),
    ),
    "variable of the wrong type": (
        Role.WORKER,
        {},
        {"ZMQTRAIN_INDEX": "one"},
        None,
        (
            "--index (or ZMQTRAIN_INDEX) is 'one'; it should be a valid integer, unable to parse "
            "string as an integer; correct it or leave it out for 0"
        ),
    ),
    "flag out of range": (
        Role.WORKER,
        {"metrics_port": "65536"},
        {},
        None,
        (
            "--metrics-port (or ZMQTRAIN_METRICS_PORT) is '65536'; it should be less than or equal "
            "to 65535; correct it or leave it out"
        ),
    ),
    "numbers that nothing can have": (
        Role.WORKER,
        {"workers": "100001", "threads": "1025"},
        {},
        None,
        (
            "--workers (or ZMQTRAIN_WORKERS) is '100001'; it should be less than or equal to "
            "100000; correct it or leave it out for 1\n"
            "--threads (or ZMQTRAIN_THREADS) is '1025'; it should be less than or equal to 1024; "
            "correct it or leave it out"
        ),
    ),
    "not a number": (
        Role.WORKER,
        {"grace_s": "nan"},
        {},
        None,
        (
            "--grace-s (or ZMQTRAIN_GRACE_S) is 'nan'; it should be a finite number; correct it or "
            "leave it out for 4.0"
        ),
    ),
    "unknown word": (
        Role.WORKER,
        {"log_level": "loud"},
        {},
        None,
        (
            "--log-level (or ZMQTRAIN_LOG_LEVEL) is 'loud'; it should be 'debug', 'info', "
            "'warning' or 'error'; correct it or leave it out for info"
        ),
    ),
    "two wrong values": (
        Role.WORKER,
        {"workers": "0", "bind": ""},
        {},
        None,
        (
            "--workers (or ZMQTRAIN_WORKERS) is '0'; it should be greater than or equal to 1; "
            "correct it or leave it out for 1\n"
            "--bind (or ZMQTRAIN_BIND) is ''; it should have at least 1 character; correct it or "
            "leave it out"
        ),
    ),
    "wrong address": (
        Role.WORKER,
        {"ps": "h:1,grpc://h:2"},
        {},
        None,
        (
            "--ps (or ZMQTRAIN_PS) is 'h:1,grpc://h:2'; address 'grpc://h:2' has the scheme "
            "grpc://; expected host:port; write 'h:2'; correct it"
        ),
    ),
    "one address twice": (
        Role.WORKER,
        {"ps": "h:1,H:1"},
        {},
        None,
        (
            "--ps (or ZMQTRAIN_PS) is 'h:1,H:1'; h:1 is listed twice; expected an address of its "
            "own for each ps; correct it"
        ),
    ),
    "zero ps": (
        Role.WORKER,
        {"ps": "0"},
        {},
        None,
        (
            "--ps (or ZMQTRAIN_PS) is '0'; expected at least one ps, which keeps the parameters; "
            "correct it"
        ),
    ),
    "worker index": (
        Role.WORKER,
        {"workers": "2", "index": "2"},
        {},
        None,
        (
            "--index (or ZMQTRAIN_INDEX) is 2; expected 0 to 1 for a worker; correct it, or have "
            "more by --workers (or ZMQTRAIN_WORKERS)"
        ),
    ),
    "ps index": (
        Role.PS,
        {"index": "1"},
        {},
        None,
        (
            "--index (or ZMQTRAIN_INDEX) is 1; expected 0 for a ps; correct it, or have more by "
            "--ps (or ZMQTRAIN_PS)"
        ),
    ),
    "chief index": (
        Role.CHIEF,
        {"index": "1"},
        {},
        None,
        "--index (or ZMQTRAIN_INDEX) is 1; expected 0 for a chief; correct it",
    ),
    "chief that is not to be": (
        Role.CHIEF,
        {"chief": False},
        {},
        None,
        (
            "this task was started as a chief, but by --chief (or ZMQTRAIN_CHIEF), TF_CONFIG or "
            "honcho the cluster has none and worker 0 hosts it; leave this task out, or say to "
            "every task that there is a chief"
        ),
    ),
    "lease shorter than heartbeats": (
        Role.WORKER,
        {"lease_s": "1.5"},
        {},
        None,
        (
            "--lease-s (or ZMQTRAIN_LEASE_S) is 1.5 and --heartbeat-s (or ZMQTRAIN_HEARTBEAT_S) is "
            "1; expected a lease of at least two heartbeats, or one late heartbeat ends a worker; "
            "make the lease longer"
        ),
    ),
    "TF_CONFIG with mistakes": (
        Role.WORKER,
        {},
        {"TF_CONFIG": "[]"},
        None,
        (
            "TF_CONFIG is []; expected an object such as "
            '{"cluster": {"ps": ["host:2222"]}, "task": {"type": "ps", "index": 0}}'
        ),
    ),
    "TF_CONFIG of another role": (
        Role.PS,
        {},
        {"TF_CONFIG": TF},
        None,
        (
            "TF_CONFIG says that this task is worker 2, but it was started as a ps; start it with "
            "python -m zmqtrain.roles.worker, or correct TF_CONFIG's task"
        ),
    ),
    "TF_CONFIG without a task": (
        Role.WORKER,
        {},
        tf_config({"ps": ["p:1"], "worker": ["w:1"]}),
        None,
        (
            "TF_CONFIG has a cluster but no task section, so every task would have index 0; "
            'expected one such as "task": {"type": "worker", "index": 0}; add it, or give --index '
            "(or ZMQTRAIN_INDEX)"
        ),
    ),
    "TF_CONFIG without ps": (
        Role.WORKER,
        {},
        tf_config({"worker": ["w:1"]}, type="worker", index=0),
        None,
        "TF_CONFIG lists no ps; expected at least one; add it there, or give --ps (or ZMQTRAIN_PS)",
    ),
    "TF_CONFIG with a hole among the ps": (
        Role.WORKER,
        {},
        tf_config({"ps": {"1": "p:1", "3": "q:1"}, "worker": ["w:1"]}, type="worker", index=0),
        None,
        (
            "TF_CONFIG leaves out ps 0 and ps 2; expected all ps from 0 on, since each holds a "
            "part of the parameters; add what is missing, or give --ps (or ZMQTRAIN_PS)"
        ),
    ),
    "TF_CONFIG of chief and ps only": (
        Role.CHIEF,
        {},
        tf_config({"chief": ["c:1"], "ps": ["p:1"]}, type="chief", index=0),
        None,
        (
            "TF_CONFIG lists no worker; expected at least one; add it there, or give --workers (or "
            "ZMQTRAIN_WORKERS)"
        ),
    ),
    "ps among dynamic workers": (
        Role.PS,
        {},
        tf_config({"worker": {}, "ps": ["p:1"]}, type="ps", index=1),
        None,
        (
            "TF_CONFIG is that of a TFJob with dynamic workers, which shows a task only a part of "
            "the cluster; give --ps (or ZMQTRAIN_PS), --workers (or ZMQTRAIN_WORKERS) and --chief "
            "(or ZMQTRAIN_CHIEF) to every task"
        ),
    ),
    "dynamic worker": (
        Role.WORKER,
        {"workers": "4"},
        tf_config({"worker": {"1": "w:1"}, "ps": ["p:1"]}, type="worker", index=1),
        None,
        (
            "TF_CONFIG is that of a TFJob with dynamic workers, which shows a task only a part of "
            "the cluster; give --chief (or ZMQTRAIN_CHIEF) to every task"
        ),
    ),
    "honcho's name of another role": (
        Role.PS,
        {},
        HONCHO,
        COUNTS,
        (
            "honcho calls this process worker.4, but it was started as a ps; expected the "
            "Procfile's line worker to start python -m zmqtrain.roles.worker; correct the line or "
            "its name"
        ),
    ),
    "honcho's name of no role": (
        Role.WORKER,
        {},
        {"HONCHO_PROCESS_NAME": "trainer.2"},
        COUNTS,
        (
            "honcho calls this process trainer.2, and 'trainer' is no role, so its index is not "
            "known; expected ps, worker or chief; rename the Procfile's line, or give --index (or "
            "ZMQTRAIN_INDEX)"
        ),
    ),
    "honcho out of sight": (
        Role.WORKER,
        {"workers": "4"},
        HONCHO,
        None,
        (
            "HONCHO_PROCESS_NAME is set, but there is no honcho above this process to tell how "
            "many tasks there are; give --ps (or ZMQTRAIN_PS)"
        ),
    ),
    "honcho without ps": (
        Role.WORKER,
        {},
        HONCHO,
        {"worker": 4},
        "honcho starts no ps; expected at least one; add it there, or give --ps (or ZMQTRAIN_PS)",
    ),
    "honcho without workers": (
        Role.PS,
        {},
        {"HONCHO_PROCESS_NAME": "ps.1"},
        {"ps": 1},
        (
            "honcho starts no worker; expected at least one; add it there, or give --workers (or "
            "ZMQTRAIN_WORKERS)"
        ),
    ),
}


@pytest.mark.parametrize(
    ("role", "flags", "environ", "counts", "sentence"), WRONG.values(), ids=WRONG
)
def test_mistake_is_refused_with_a_reason(
    role: Role,
    flags: dict[str, Any],
    environ: dict[str, str],
    counts: dict[str, int] | None,
    sentence: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(role, flags, environ, counts)
    assert str(caught.value) == sentence


def test_task_config_is_a_timing() -> None:
    config = load(flags={"heartbeat_s": "0.5"})
    assert isinstance(config, Timing)
    assert Timing().heartbeat_s == 1.0
    assert config.heartbeat_s == 0.5


def test_flag_of_a_job_override_beats_its_variable() -> None:
    environ = {"ZMQTRAIN_STEPS": "10", "ZMQTRAIN_SEED": "3", "ZMQTRAIN_POLICY": ""}
    overrides = load_overrides({"steps": "20", "data": "digits", "policy": None}, environ)
    assert overrides == {"steps": 20, "seed": 3, "data": "digits"}


def test_wrong_job_override_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        load_overrides({"steps": "0"}, {})
    assert str(caught.value) == (
        "--steps (or ZMQTRAIN_STEPS) is '0'; it should be greater than or equal to 1; correct it "
        "or leave it out"
    )


def test_nothing_else_in_the_package_reads_the_environment() -> None:
    """But for where the user's caches are, and what a compiler inherits.

    The fork_server sets a variable of OpenBLAS for a moment.
    """
    package = Path(zmqtrain.__file__).parent
    readers = [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        if re.search(r"\b(os\.environ|getenv)\b", path.read_text())
    ]
    assert readers == [
        "config.py",
        "fork_server.py",
        "optim/kernels/cpu.py",
        "optim/kernels/machine_code.py",
    ]


def test_without_arguments_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQTRAIN_STEPS", "7")
    assert load_overrides({}) == {"steps": 7}
