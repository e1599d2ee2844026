"""TF_CONFIG: every form that TensorFlow and Kubeflow write, every mistake that people make."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.config.cluster import Cluster, Role, Task
from zmqtrain.config.tf_config import parse_tf_config, read_tf_config
from zmqtrain.errors import ConfigError

WORKER_0 = {"type": "worker", "index": 0}


def host(name: str) -> str:
    return f"j-{name}.ns.svc:2222"


FORMS: dict[str, tuple[dict[str, Any], Cluster | None, Task | None]] = {
    "lists with a chief": (
        {
            "cluster": {
                "chief": [host("chief-0")],
                "ps": [host("ps-0"), host("ps-1")],
                "worker": [host("worker-0"), host("worker-1"), host("worker-2")],
            },
            "task": {"type": "worker", "index": 2},
            "environment": "cloud",
        },
        Cluster((host("ps-0"), host("ps-1")), workers=3, chief=True),
        Task(Role.WORKER, 2),
    ),
    "master is the chief": (
        {
            "cluster": {"master": ["m:1"], "ps": ["p:1"], "worker": ["w:1"]},
            "task": {"type": "master", "index": 0},
        },
        Cluster(("p:1",), workers=1, chief=True),
        Task(Role.CHIEF, 0),
    ),
    "no chief": (
        {"cluster": {"ps": ["p:1"], "worker": ["w:1", "v:1"]}, "task": WORKER_0},
        Cluster(("p:1",), workers=2, chief=False),
        Task(Role.WORKER, 0),
    ),
    "evaluator is no worker": (
        {
            "cluster": {"evaluator": ["e:1"], "ps": ["p:1"], "worker": ["w:1"]},
            "task": WORKER_0,
        },
        Cluster(("p:1",), workers=1, chief=False),
        Task(Role.WORKER, 0),
    ),
    "index as a string": (
        {
            "cluster": {"ps": ["p:1", "q:1"], "worker": ["w:1"]},
            "task": {"type": "ps", "index": "1"},
        },
        Cluster(("p:1", "q:1"), workers=1, chief=False),
        Task(Role.PS, 1),
    ),
    "maps by index": (
        {
            "cluster": {"ps": {"1": "q:1", "0": "p:1"}, "worker": {"0": "w:1"}},
            "task": WORKER_0,
        },
        Cluster(("p:1", "q:1"), workers=1, chief=False),
        Task(Role.WORKER, 0),
    ),
    "maps with holes": (
        {
            "cluster": {"ps": {"2": "p:1"}, "worker": {"0": "v:1", "3": "w:1"}},
            "task": {"type": "ps", "index": 2},
        },
        Cluster(("", "", "p:1"), workers=4, chief=False),
        Task(Role.PS, 2),
    ),
    "no task": (
        {"cluster": {"ps": ["p:1"], "worker": ["w:1"]}},
        Cluster(("p:1",), workers=1, chief=False),
        None,
    ),
    "no cluster": ({"task": WORKER_0}, None, Task(Role.WORKER, 0)),
    "unknown keys": ({"rpc_layer": "grpc", "service": {"x": []}}, None, None),
    "dynamic worker": (
        {
            "cluster": {"worker": {"1": host("worker-1")}, "ps": [host("ps-0"), host("ps-1")]},
            "task": {"type": "worker", "index": 1},
        },
        Cluster((host("ps-0"), host("ps-1")), workers=2, chief=False, partial=True),
        Task(Role.WORKER, 1),
    ),
    "dynamic worker, old key": (
        {
            "sparseCluster": {"worker": {"0": host("worker-0")}, "ps": [host("ps-0")]},
            "task": WORKER_0,
        },
        Cluster((host("ps-0"),), workers=1, chief=False, partial=True),
        Task(Role.WORKER, 0),
    ),
    "ps among dynamic workers": (
        {
            "cluster": {"worker": {}, "ps": [host("ps-1")]},
            "task": {"type": "ps", "index": 1},
        },
        Cluster(("", host("ps-1")), workers=0, chief=False, partial=True),
        Task(Role.PS, 1),
    ),
    "chief among dynamic workers": (
        {"cluster": {"worker": {}, "ps": []}, "task": {"type": "chief", "index": 0}},
        Cluster((), workers=0, chief=True, partial=True),
        Task(Role.CHIEF, 0),
    ),
}


@pytest.mark.parametrize(("document", "cluster", "task"), FORMS.values(), ids=FORMS)
def test_form_is_read(document: dict[str, Any], cluster: Cluster | None, task: Task | None) -> None:
    assert parse_tf_config(json.dumps(document)) == (cluster, task)


@pytest.mark.parametrize("text", ["", "  \n"])
def test_empty_text_counts_as_unset(text: str) -> None:
    assert parse_tf_config(text) == (None, None)


CLUSTER = {"ps": ["p:1"], "worker": ["w:1", "v:1"]}
EXAMPLE = '{"cluster": {"ps": ["host:2222"]}, "task": {"type": "ps", "index": 0}}'

MISTAKES: dict[str, tuple[Any, str]] = {
    "no object": ([1], f"is [1]; expected an object such as {EXAMPLE}"),
    "cluster is no object": (
        {"cluster": ["p:1"]},
        'has the cluster ["p:1"]; expected an object of jobs',
    ),
    "unknown job": (
        {"cluster": {**CLUSTER, "workers": ["x:1"]}},
        (
            "lists the job 'workers'; expected ps, worker, chief (or master) or evaluator; rename "
            "or remove it"
        ),
    ),
    "job is no list": (
        {"cluster": {"ps": "p:1"}},
        (
            'has "p:1" for ps; expected a list of addresses, or an object of them by index, such '
            'as {"0": "host:2222"}'
        ),
    ),
    "key is no index": (
        {"cluster": {"ps": {"first": "p:1"}}},
        'lists ps under the index "first"; expected a whole number from 0 to 99999',
    ),
    "empty address": (
        {"cluster": {"ps": ["p:1", ""]}},
        (
            "has a wrong entry for ps 1: an address is empty; expected host:port; fill it in or "
            "leave it out"
        ),
    ),
    "null address": (
        {"cluster": {"ps": [None]}},
        "has a wrong entry for ps 0: address null is no string; expected host:port",
    ),
    "scheme": (
        {"cluster": {"ps": ["grpc://p:1"]}},
        (
            "has a wrong entry for ps 0: address 'grpc://p:1' has the scheme grpc://; expected "
            "host:port; write 'p:1'"
        ),
    ),
    "IPv6 without brackets": (
        {"cluster": {"worker": ["fe80::1:2222"]}},
        (
            "has a wrong entry for worker 0: address 'fe80::1:2222' looks like IPv6 without "
            "brackets; expected [IPv6]:port, such as [::1]:2222; put brackets around the IP address"
        ),
    ),
    "one address twice": (
        {"cluster": {"ps": ["h:1"], "worker": ["w:1", "H:1"]}},
        (
            "gives h:1 to both ps 0 and worker 1; expected an address of its own for each task; "
            "change one of the ports"
        ),
    ),
    "chief and master": (
        {"cluster": {**CLUSTER, "chief": ["c:1"], "master": ["m:1"]}},
        "lists both chief and master, two names of one role; expected one of them; remove master",
    ),
    "several chiefs": (
        {"cluster": {**CLUSTER, "chief": ["c:1", "d:1"]}},
        "lists 2 chiefs; expected at most one; remove the others",
    ),
    "task is no object": (
        {"cluster": CLUSTER, "task": "worker"},
        (
            'has the task section "worker"; expected a type and an index, such as '
            '{"type": "worker", "index": 0}'
        ),
    ),
    "task without an index": (
        {"cluster": CLUSTER, "task": {"type": "worker"}},
        (
            'has the task section {"type": "worker"}; expected a type and an index, such as '
            '{"type": "worker", "index": 0}'
        ),
    ),
    "unknown type": (
        {"cluster": CLUSTER, "task": {"type": "Worker", "index": 0}},
        'has the task type "Worker"; expected ps, worker or chief',
    ),
    "evaluator": (
        {"cluster": CLUSTER, "task": {"type": "evaluator", "index": 0}},
        (
            "makes this task an evaluator; zmqtrain has none, its chief evaluates; remove the "
            "Evaluator replicas and use --evaluate-every"
        ),
    ),
    "index is no number": (
        {"cluster": CLUSTER, "task": {"type": "worker", "index": "one"}},
        'gives this task the index "one"; expected a whole number from 0 to 99999',
    ),
    "index is true": (
        {"cluster": CLUSTER, "task": {"type": "worker", "index": True}},
        "gives this task the index true; expected a whole number from 0 to 99999",
    ),
    "index is negative": (
        {"cluster": CLUSTER, "task": {"type": "worker", "index": -1}},
        "gives this task the index -1; expected a whole number from 0 to 99999",
    ),
    "type not in the cluster": (
        {"cluster": CLUSTER, "task": {"type": "chief", "index": 0}},
        (
            "says that this task is chief 0, but its cluster lists ps, worker; add chief to the "
            "cluster, or correct the task's type"
        ),
    ),
    "index out of range": (
        {"cluster": CLUSTER, "task": {"type": "worker", "index": 2}},
        (
            "says that this task is worker 2, but its cluster lists worker 0, 1; expected one of "
            "these; correct the task's index"
        ),
    ),
    "index in a hole": (
        {
            "cluster": {"ps": {"0": "p:1", "2": "q:1"}, "worker": {}},
            "task": {"type": "ps", "index": 1},
        },
        (
            "says that this task is ps 1, but its cluster lists ps 0, 2; expected one of these; "
            "correct the task's index"
        ),
    ),
    "ps index out of a full list": (
        {"cluster": CLUSTER, "task": {"type": "ps", "index": 1}},
        (
            "says that this task is ps 1, but its cluster lists ps 0; expected one of these; "
            "correct the task's index"
        ),
    ),
}


@pytest.mark.parametrize(("document", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_named(document: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tf_config(json.dumps(document))
    assert str(caught.value) == f"TF_CONFIG {sentence}"


def test_invalid_json_is_shown_with_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tf_config("{'cluster': {}}")
    assert str(caught.value) == (
        "TF_CONFIG is not valid JSON (Expecting property name enclosed in double quotes: line 1 "
        f"column 2 (char 1)); expected an object such as {EXAMPLE}; check its quotes and commas"
    )


def test_endless_nesting_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="is not valid JSON"):
        parse_tf_config("[" * 100_000)


def test_all_mistakes_are_reported_at_once() -> None:
    document = {
        "cluster": {"ps": ["p"], "chief": ["c:1", "d:1"]},
        "task": {"type": "x", "index": 0},
    }
    assert len(read_tf_config(json.dumps(document)).mistakes) == 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cluster", "task", "ps", "worker", "chief", "type", "index", "0"]),
            children,
            max_size=4,
        )
    ),
)


@settings(deadline=None)
@given(JSON)
def test_any_json_is_read_to_the_end(document: Any) -> None:
    reading = read_tf_config(json.dumps(document))
    if not reading.mistakes and reading.task and reading.cluster and not reading.cluster.partial:
        assert reading.task in reading.addresses
