from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from zmqtrain.observe.metrics import NAMESPACE, CheckpointStages, Metrics, Pushes, State
from zmqtrain.protocol.status import TableStatus

TASKS = [("ps", 0), ("ps", 1), ("worker", 0), ("chief", 0)]


def families(metrics: Metrics) -> set[str]:
    text = generate_latest(metrics.registry).decode()
    return set(re.findall(r"^# TYPE zmqtrain_(\S+)", text, re.MULTILINE))


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"{NAMESPACE}_{name}", labels)


def test_each_role_exposes_only_what_it_can_have() -> None:
    leader, ps, worker, chief = (families(Metrics(role, index)) for role, index in TASKS)
    common = leader & ps & worker & chief
    assert {"build_info", "task_info", "role_state", "event_loop_lag_seconds"} <= common
    assert leader > ps
    assert {"global_step", "policy_info", "worker_step", "waiting_workers"} <= leader - ps
    assert {"pushes_total", "staleness_versions", "parameter_version"} <= ps - worker - chief
    assert {"steps_total", "train_loss", "phase_duration_seconds"} <= worker - leader - chief
    assert {"evaluation_loss", "checkpoint_bytes"} <= chief - leader - worker
    assert "nonfinite_gradients_total" in ps & worker - chief


def test_attribute_is_the_exposed_name_without_namespace_and_total() -> None:
    attributes = set(vars(Metrics("ps"))) - {"registry"}
    exposed = set().union(*(families(Metrics(role, index)) for role, index in TASKS))
    names = {re.sub("_total$", "", name) for name in exposed} - {"build_info", "task_info"}
    assert {name.removesuffix("_info") for name in names} == attributes


def test_metric_of_another_role_can_be_counted_but_is_not_exposed() -> None:
    metrics = Metrics("worker", 2)
    metrics.pushes.applied.inc()
    metrics.global_step.set(5)
    assert value(metrics, "pushes_total", result="applied") is None
    assert value(metrics, "global_step") is None


def test_task_exposes_its_role_and_its_versions() -> None:
    text = generate_latest(Metrics("worker", 7).registry).decode()
    assert 'zmqtrain_task_info{index="7",role="worker"} 1.0' in text
    assert re.search(
        r'zmqtrain_build_info\{numpy="\S+",python="3\.\S+",pyzmq="\S+",version="', text
    )


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("pushes_total", "result", [field.name for field in fields(Pushes)]),
        ("checkpoint_failures_total", "stage", [field.name for field in fields(CheckpointStages)]),
        ("connected_peers", "role", ["chief", "ps", "worker"]),
        ("lease_expirations_total", "role", ["chief", "ps", "worker"]),
    ],
)
def test_series_known_to_exist_are_zero_from_the_start(
    name: str, label: str, values: list[str]
) -> None:
    metrics = Metrics("ps")
    assert [value(metrics, name, **{label: each}) for each in values] == [0] * len(values)


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("worker", "train_loss"),
        ("chief", "evaluation_loss"),
        ("chief", "evaluation_accuracy"),
        ("ps", "learning_rate"),
        ("ps", "expected_workers"),
        ("ps", "global_step_target"),
    ],
)
def test_gauge_without_a_value_yet_is_nan(task: str, name: str) -> None:
    unknown = value(Metrics(task), name)
    assert unknown is not None and math.isnan(unknown)


@pytest.mark.parametrize("state", get_args(State))
def test_task_is_in_exactly_one_state(state: State) -> None:
    metrics = Metrics("chief")
    assert value(metrics, "role_state", state="starting") == 1
    metrics.role_state.set("training")
    metrics.role_state.set(state)
    for each in get_args(State):
        assert value(metrics, "role_state", state=each) == (each == state)


def test_fresh_gradient_counts_in_the_bucket_of_zero() -> None:
    metrics = Metrics("ps")
    for versions in (0, 0, 3, 1000):
        metrics.staleness_versions.observe(versions)
    buckets = {
        le: value(metrics, "staleness_versions_bucket", le=le) for le in ("0.0", "2.0", "4.0")
    }
    assert buckets == {"0.0": 2, "2.0": 2, "4.0": 3}
    assert value(metrics, "staleness_versions_count") == 4


def test_forgotten_worker_is_no_longer_exposed() -> None:
    metrics = Metrics("ps")
    metrics.worker_step[0].set(10)
    metrics.worker_step[1].set(20)
    metrics.worker_step.forget(0)
    metrics.worker_step.forget(5)  # never seen: nothing to do
    assert value(metrics, "worker_step", worker="0") is None
    assert value(metrics, "worker_step", worker="1") == 20
    metrics.worker_step[0].set(1)
    assert value(metrics, "worker_step", worker="0") == 1


def test_any_text_of_a_label_is_read_back_as_it_was() -> None:
    metrics, text = Metrics("ps"), 'a"b\\c\nzmqtrain_global_step 7\t\x1b[2J{},='
    metrics.policy.info({"policy": text})
    told = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    samples = [each for family in told for each in family.samples]
    assert [s.labels for s in samples if s.name == "zmqtrain_policy_info"] == [{"policy": text}]
    assert [s.value for s in samples if s.name == "zmqtrain_global_step"] == [0.0]


def test_tables_have_a_series_each_of_which_there_are_few() -> None:
    metrics = Metrics("ps", 0)
    tables = {
        f"table {n}": TableStatus(None, n, 64 * n, updated=10, forgotten=2) for n in range(99)
    }
    for _ in range(2):  # totals, not sums of them
        metrics.show_tables(tables)
    text = generate_latest(metrics.registry).decode()
    assert 'zmqtrain_table_rows{table="table 7"} 7.0' in text
    assert 'zmqtrain_table_updated_rows_total{table="table 7"} 10.0' in text
    assert text.count("zmqtrain_table_bytes{") == 50
