"""Changes that templates make to the pods of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.clusters.examples import ROOT, example_plan
from tests.clusters.test_manifests import (
    TRAINER_MODELS,
    as_plain_objects,
    mistakes_of,
    plain,
    pods_of,
    unknown_to_trainer,
)
from zmqtrain.clusters.kubernetes import CONTAINERS, KINDS, manifests
from zmqtrain.clusters.pod_options import merged
from zmqtrain.config.cluster import Role
from zmqtrain.errors import ConfigError

TEMPLATE = """
metadata:
  annotations: {sidecar.istio.io/inject: "false"}
  labels: {team: vision}
spec:
  priorityClassName: high
  imagePullSecrets: [{name: registry}]
  securityContext: {runAsUser: null}
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
  initContainers: [{name: log, image: fluent, restartPolicy: Always}]
  containers:
  - name: zmqtrain
    env: [{name: TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}]
    envFrom: [{secretRef: {name: s3}}]
    resources: {limits: {nvidia.com/mig-1g.5gb: 1}}
    volumeMounts: [{name: scratch, mountPath: /scratch}]
  volumes: [{name: scratch, emptyDir: {}}]
"""


@pytest.fixture
def template(tmp_path: Path) -> Any:
    """Returns a function that writes a template, and returns its path."""

    def write(text: str, name: str = "pods.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_template_is_merged_into_all_pods_of_every_kind(kind: str, template: Any) -> None:
    objects = manifests(example_plan(kind=kind, template=template(TEMPLATE)))
    for role, pod in pods_of(objects):
        assert pod["metadata"]["labels"]["team"] == "vision"
        spec = pod["spec"]
        assert spec["priorityClassName"] == "high"
        assert "runAsUser" not in spec["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"]
        (container,) = spec["containers"]
        assert container["name"] == CONTAINERS[kind]
        assert container["env"][-1]["name"] == "TOKEN" and len(container["env"]) > 5
        assert container["resources"]["limits"]["nvidia.com/mig-1g.5gb"] == 1
        assert {"keys", "scratch"} <= {item["name"] for item in spec["volumes"]}
        assert f"--role {role}" in " ".join(container["command"])


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_know_every_field_of_a_changed_pod(kind: str, template: Any) -> None:
    plan = example_plan(kind=kind, template=template(TEMPLATE), node_selector="a=b", ps_gpu=1)
    objects = plain(manifests(plan))
    assert [mistakes_of(item, "1.36") for item in as_plain_objects(objects)] == [""] * (
        len([item for item in objects if item["kind"] in ("Secret", "Service")]) + len(Role)
    )
    for item in objects:
        if item["kind"] in TRAINER_MODELS:
            assert unknown_to_trainer(item) == []


def test_template_in_the_documents_is_one_that_kubernetes_knows(template: Any) -> None:
    text = (ROOT / "docs/engines.md").read_text().split("```yaml\n# pods.yaml\n")[1].split("```")[0]
    objects = plain(manifests(example_plan(kind="jobs", template=template(text))))
    assert not any(mistakes_of(item, "1.36") for item in objects)
    assert "nvidia.com/mig-1g.10gb" in str(objects)


def test_template_of_a_role_changes_its_pods_alone(template: Any) -> None:
    everywhere = template("spec: {nodeSelector: {pool: cpu}}")
    on_ps = template("spec: {nodeSelector: {pool: memory}}", "ps.yaml")
    objects = manifests(example_plan(template=f"{everywhere},ps={on_ps}"))
    found = {role: pod["spec"]["nodeSelector"]["pool"] for role, pod in pods_of(objects)}
    assert found == {Role.PS: "memory", Role.CHIEF: "cpu", Role.WORKER: "cpu"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "metadata and spec"),
        ("spec: {}\nstatus: {}", "metadata and spec"),
        ("containers: []", "metadata and spec"),
        ("spec: [", "cannot be read"),
        ("metadata: {annotations: {since: 2026-11-27}}", "cannot be read"),
        ("spec: 3", "expected a map"),
        ("metadata: {name: x}", "sets name"),
        ("metadata: {labels: {app.kubernetes.io/instance: x}}", "sets app.kubernetes.io/instance"),
        ("spec: {containers: [zmqtrain]}", "expected a"),
        ("spec: {restartPolicy: Always}", "sets restartPolicy"),
        ("spec: {containers: {name: zmqtrain}}", "expected a list"),
        ("spec: {containers: [{name: zmqtrain, command: [sh]}]}", "sets command"),
        ("spec: {containers: [{name: zmqtrain, env: [{name: ZMQTRAIN_PS}]}]}", "ZMQTRAIN_PS"),
        ("spec: {containers: [{name: zmqtrain, volumeMounts: [{mountPath: /logdir}]}]}", "/logdir"),
    ],
)
def test_template_that_sets_what_the_job_depends_on_is_refused(
    text: str, told: str, template: Any
) -> None:
    with pytest.raises(ValidationError, match=told):
        example_plan(template=template(text))


@pytest.mark.parametrize("option", ["nowhere.yaml", "driver=pods.yaml"])
def test_template_that_is_not_there_or_of_no_role_is_refused(option: str) -> None:
    with pytest.raises(ValidationError, match=r"cannot be read|is not a role"):
        example_plan(template=option)


@pytest.mark.parametrize("labels", ["ssd", "disk=ssd,", "=ssd", "disk=a b"])
def test_labels_that_are_none_are_refused(labels: str) -> None:
    with pytest.raises(ValidationError, match="expected labels"):
        example_plan(node_selector=labels)


VALUES = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_change_that_was_made_changes_nothing_when_it_is_made_again(ours: Any, change: Any) -> None:
    once = merged(ours, change)
    assert merged(once, change) == once
    assert merged(once, {}) == once or not isinstance(once, dict)


def test_named_items_are_merged_and_others_added() -> None:
    ours = yaml.safe_load("{env: [{name: A, value: 1}], tolerations: [{key: a}]}")
    change = yaml.safe_load(
        "{env: [{name: B, value: 2}, {name: A, value: 3}], tolerations: [{key: b}]}"
    )
    assert merged(ours, change) == {
        "env": [{"name": "A", "value": 3}, {"name": "B", "value": 2}],
        "tolerations": [{"key": "a"}, {"key": "b"}],
    }


@pytest.mark.parametrize("name", ["ZMQTRAIN_METRICS_HOST", "ZMQTRAIN_METRICS_PORT"])
def test_address_of_metrics_that_probes_would_not_find_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--env gives {name}"):
        manifests(replace(example_plan(), variables={name: "127.0.0.1"}))


@pytest.mark.parametrize("variables", [{}, {"ZMQTRAIN_METRICS_CERT": "/tls/cert.pem"}])
def test_probes_speak_https_if_the_metrics_do(variables: dict[str, str]) -> None:
    pods = dict(pods_of(manifests(replace(example_plan(), variables=variables))))
    container = pods[Role.PS]["spec"]["containers"][0]
    probes = (container[f"{kind}Probe"] for kind in ("startup", "liveness"))
    schemes = {probe["httpGet"].get("scheme") for probe in probes}
    assert schemes == {"HTTPS" if variables else None}
