"""TF_CONFIG: every form that TensorFlow and Kubeflow write, every mistake that people make."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.config.cluster import Role
from zmqtrain.config.options import names_of
from zmqtrain.config.resolvers.tf_config import read_tf_config, resolve
from zmqtrain.errors import ConfigError

WORKER_0 = {"type": "worker", "index": 0}


def host(name: str) -> str:
    return f"j-{name}.ns.svc:2222"


CLUSTER = {"ps": ["p:1"], "worker": ["w:1", "v:1"]}
ITS_OPTIONS = {"ps": ("p:1",), "workers": 2, "worker_addresses": ("w:1", "v:1"), "chief": False}

FORMS: dict[str, tuple[dict[str, Any], Role, dict[str, Any]]] = {
    "lists with a chief": (
        {
            "cluster": {"chief": ["c:1"], "ps": ["p:1", "q:1"], "worker": ["w:1", "v:1", "u:1"]},
            "task": {"type": "worker", "index": 2},
            "environment": "cloud",
        },
        Role.WORKER,
        {
            "index": 2,
            "ps": ("p:1", "q:1"),
            "workers": 3,
            "worker_addresses": ("w:1", "v:1", "u:1"),
            "chief": True,
            "chief_address": "c:1",
        },
    ),
    "master is the chief": (
        {
            "cluster": {"master": ["m:1"], "ps": ["p:1"], "worker": ["w:1"]},
            "task": {"type": "master", "index": 0},
        },
        Role.CHIEF,
        {
            "index": 0,
            "ps": ("p:1",),
            "workers": 1,
            "worker_addresses": ("w:1",),
            "chief": True,
            "chief_address": "m:1",
        },
    ),
    "evaluator is no worker": (
        {"cluster": {"evaluator": ["e:1"], **CLUSTER}, "task": WORKER_0},
        Role.WORKER,
        ITS_OPTIONS | {"index": 0},
    ),
    "maps by index, index as a string": (
        {
            "cluster": {"ps": {"1": "q:1", "0": "p:1"}, "worker": {"0": "w:1", "3": "v:1"}},
            "task": {"type": "ps", "index": "1"},
        },
        Role.PS,
        {
            "index": 1,
            "ps": ("p:1", "q:1"),
            "workers": 4,
            "worker_addresses": ("w:1", "", "", "v:1"),
            "chief": False,
        },
    ),
    "no task": ({"cluster": CLUSTER}, Role.PS, ITS_OPTIONS),
    "workers alone, as Kubeflow writes it": (
        {
            "cluster": {"worker": [host("worker-0"), host("worker-1")]},
            "task": {"type": "worker", "index": 1},
            "environment": "cloud",
        },
        Role.WORKER,
        {
            "index": 1,
            "ps": (),
            "workers": 2,
            "worker_addresses": (host("worker-0"), host("worker-1")),
            "chief": False,
        },
    ),
    "a chief and workers": (
        {
            "cluster": {"chief": ["c:1"], "worker": ["w:1"], "ps": []},
            "task": {"type": "chief", "index": 0},
        },
        Role.CHIEF,
        {
            "index": 0,
            "ps": (),
            "workers": 1,
            "worker_addresses": ("w:1",),
            "chief": True,
            "chief_address": "c:1",
        },
    ),
    "no cluster": ({"task": WORKER_0}, Role.WORKER, {"index": 0}),
    "unknown keys": ({"rpc_layer": "grpc", "service": {"x": []}}, Role.PS, {}),
    "dynamic worker": (
        {
            "cluster": {"worker": {"1": host("worker-1")}, "ps": [host("ps-0"), host("ps-1")]},
            "task": {"type": "worker", "index": 1},
        },
        Role.WORKER,
        {"index": 1, "ps": (host("ps-0"), host("ps-1")), "workers": 2},
    ),
}


@pytest.mark.parametrize(("document", "role", "found"), FORMS.values(), ids=FORMS)
def test_form_is_read(document: dict[str, Any], role: Role, found: dict[str, Any]) -> None:
    assert resolve(role, {}, {"TF_CONFIG": json.dumps(document)}) == found


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "  \n"}])
def test_empty_text_counts_as_unset(environ: dict[str, str]) -> None:
    assert resolve(Role.WORKER, {}, environ) == {}


DYNAMIC: dict[str, tuple[dict[str, Any], list[str]]] = {
    "first worker": (
        {"sparseCluster": {"worker": {"0": "w:1"}, "ps": ["p:1"]}, "task": WORKER_0},
        ["chief", "workers"],
    ),
    "ps": (
        {"cluster": {"worker": {}, "ps": ["q:1"]}, "task": {"type": "ps", "index": 1}},
        ["ps", "workers"],
    ),
    "chief": (
        {"cluster": {"worker": {}, "ps": []}, "task": {"type": "chief", "index": 0}},
        ["ps", "workers"],
    ),
}


@pytest.mark.parametrize(("document", "needed"), DYNAMIC.values(), ids=DYNAMIC)
def test_addresses_hidden_from_dynamic_workers_have_to_be_given(
    document: dict[str, Any], needed: list[str]
) -> None:
    environ = {"TF_CONFIG": json.dumps(document)}
    task = read_tf_config(environ["TF_CONFIG"]).task
    assert task is not None
    with pytest.raises(ConfigError) as caught:
        resolve(task.role, {}, environ)
    for name in needed:
        assert names_of(name) in str(caught.value)
    found = resolve(task.role, dict.fromkeys(needed, 3), environ)
    assert found["index"] == task.index


def test_dynamic_workers_without_ps_are_refused_unless_ps_are_given() -> None:
    """Such a TF_CONFIG does not show where the others listen."""
    document = {
        "cluster": {"worker": {"1": "w:1"}, "ps": []},
        "task": {"type": "worker", "index": 1},
    }
    environ = {"TF_CONFIG": json.dumps(document)}
    with pytest.raises(ConfigError) as caught:
        resolve(Role.WORKER, {}, environ)
    assert "enableDynamicWorker" in str(caught.value)
    resolve(Role.WORKER, {"ps": "p:1"}, environ)


INCOMPLETE: dict[str, tuple[dict[str, Any], str, str]] = {
    "a hole among the ps": ({"ps": {"1": "p:1", "3": "q:1"}, "worker": ["w:1"]}, "ps", "1, 3"),
    "no worker": ({"ps": ["p:1"], "chief": ["c:1"]}, "workers", "no worker"),
}


@pytest.mark.parametrize(("cluster", "name", "told"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_part_missing_in_the_cluster_has_to_be_given(
    cluster: dict[str, Any], name: str, told: str
) -> None:
    environ = {"TF_CONFIG": json.dumps({"cluster": cluster})}
    with pytest.raises(ConfigError) as caught:
        resolve(Role.WORKER, {}, environ)
    assert told in str(caught.value)
    assert names_of(name) in str(caught.value)
    resolve(Role.WORKER, {name: "given"}, environ)


MISTAKES: dict[str, tuple[Any, str]] = {
    "no object": ([1], "[1]"),
    "cluster is no object": ({"cluster": ["p:1"]}, '["p:1"]'),
    "unknown job": ({"cluster": {**CLUSTER, "workers": ["x:1"]}}, "'workers'"),
    "job is no list": ({"cluster": {"ps": "p:1"}}, '"p:1"'),
    "key is no index": ({"cluster": {"ps": {"first": "p:1"}}}, '"first"'),
    "key has another zero": ({"cluster": {"ps": {"0": "p:1", "00": "q:1"}}}, '"00"'),
    "empty address": ({"cluster": {"ps": ["p:1", ""]}}, "ps 1"),
    "null address": ({"cluster": {"ps": [None]}}, "ps 0: address null"),
    "scheme": ({"cluster": {"ps": ["grpc://p:1"]}}, "grpc://"),
    "one address twice": ({"cluster": {"ps": ["h:1"], "worker": ["w:1", "H:1"]}}, "h:1"),
    "chief and master": ({"cluster": {**CLUSTER, "chief": ["c:1"], "master": ["m:1"]}}, "master"),
    "several chiefs": ({"cluster": {**CLUSTER, "chief": ["c:1", "d:1"]}}, "2 chiefs"),
    "task is no object": ({"cluster": CLUSTER, "task": "worker"}, '"worker"'),
    "task without an index": ({"task": {"type": "worker"}}, "index"),
    "unknown type": ({"task": {"type": "Worker", "index": 0}}, '"Worker"'),
    "evaluator": ({"task": {"type": "evaluator", "index": 0}}, "evaluator"),
    "index is no number": ({"task": {"type": "worker", "index": "one"}}, '"one"'),
    "index is true": ({"task": {"type": "worker", "index": True}}, "true"),
    "index is negative": ({"task": {"type": "worker", "index": -1}}, "-1"),
    "type not in the cluster": (
        {"cluster": CLUSTER, "task": {"type": "chief", "index": 0}},
        "chief 0",
    ),
    "index out of range": ({"cluster": CLUSTER, "task": {"type": "worker", "index": 2}}, "2"),
    "another role": ({"task": {"type": "ps", "index": 0}}, "zmqtrain.roles.ps"),
}


@pytest.mark.parametrize(("document", "told"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_refused_with_the_value(document: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Role.WORKER, {}, {"TF_CONFIG": json.dumps(document)})
    assert "TF_CONFIG" in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize("again", ['"task": {}', '"x": {"ps": [], "ps": []}'])
def test_key_that_stands_twice_is_refused(again: str) -> None:
    with pytest.raises(ConfigError, match="twice in one object"):
        resolve(Role.WORKER, {}, {"TF_CONFIG": f'{{"cluster": {{}}, "task": {{}}, {again}}}'})


@pytest.mark.parametrize("text", ["{'cluster': {}}", "[" * 100_000])
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_tf_config(text)


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


@given(JSON)
def test_any_json_is_read_or_refused(document: Any) -> None:
    with contextlib.suppress(ConfigError):
        config = read_tf_config(json.dumps(document))
        if config.task and config.addresses and not config.is_dynamic:
            assert config.task in config.addresses
