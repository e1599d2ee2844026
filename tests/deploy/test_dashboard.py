from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from tests.deploy import queries
from zmqtrain.observe.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/zmqtrain.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """Every series name that a task of some role exposes."""
    tasks = [Metrics("ps", 0), Metrics("worker"), Metrics("chief")]
    text = "".join(generate_latest(task.registry).decode() for task in tasks)
    return queries.exposed_names(text)


def test_queries_read_only_metrics_that_some_role_exposes(exposed: set[str]) -> None:
    known = exposed | queries.recorded_names()
    unknown = {
        (query.where, name)
        for query in (*queries.dashboard_queries(), *queries.rule_queries())
        for name in queries.metric_names(query.expr) - known
    }
    assert not unknown


def test_every_metric_that_zmqtrain_declares_is_shown_on_the_dashboard(exposed: set[str]) -> None:
    shown = set().union(*(queries.metric_names(q.expr) for q in queries.dashboard_queries()))
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in exposed}
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    declared = {name for name in families if name.startswith("zmqtrain_")}
    assert declared - shown == {"zmqtrain_checkpoint_interval_seconds"}  # only the alert needs it


def test_panels_have_ids_titles_and_descriptions_of_their_own(
    dashboard: dict[str, Any], panels: list[dict[str, Any]]
) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    assert all(panel["description"] for panel in panels)


def test_panels_have_a_unit(panels: list[dict[str, Any]]) -> None:
    assert [p["title"] for p in panels if not p["fieldConfig"]["defaults"].get("unit")] == []


def test_data_source_is_always_the_template_variable(
    dashboard: dict[str, Any], panels: list[dict[str, Any]]
) -> None:
    sources = [panel["datasource"] for panel in panels]
    sources += [target["datasource"] for panel in panels for target in panel["targets"]]
    sources += [annotation["datasource"] for annotation in dashboard["annotations"]["list"]]
    variables = dashboard["templating"]["list"]
    sources += [v["datasource"] for v in variables if v["type"] != "datasource"]
    assert all(source == DATASOURCE for source in sources)
    assert "datasource" in {v["name"] for v in variables if v["type"] == "datasource"}
    assert "__inputs" not in dashboard


def test_panels_fit_the_grid_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    boxes = [(panel["title"], panel["gridPos"]) for panel in dashboard["panels"]]
    assert all(box["x"] + box["w"] <= 24 for _, box in boxes)
    overlapping = [
        (one, two)
        for (one, a), (two, b) in combinations(boxes, 2)
        if a["x"] < b["x"] + b["w"]
        and b["x"] < a["x"] + a["w"]
        and a["y"] < b["y"] + b["h"]
        and b["y"] < a["y"] + a["h"]
    ]
    assert not overlapping


def test_queries_use_no_range_narrower_than_the_scrapes(dashboard: dict[str, Any]) -> None:
    """A fixed short range shows gaps as soon as Prometheus scrapes less often."""
    ranges = set(re.findall(r"\[([^\]]+)\]", " ".join(_expressions(dashboard))))
    assert ranges <= {"$__rate_interval", "$__rate_interval:", "5m", "10m"}


def test_variables_in_queries_are_declared(dashboard: dict[str, Any]) -> None:
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(_expressions(dashboard))))
    assert used - declared == {"__rate_interval"}


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ('sum by (job, le) (rate(a_bucket{x="by_name"}[5m]))', {"a_bucket"}),
        ("a_total * on (job) group_left (role) b_info > 0.5", {"a_total", "b_info"}),
        ("time() - max(a > 0) or b unless on (job) c", {"a", "b", "c"}),
        ("job:a:rate5m >= on (job) max by (job) (b < +Inf)", {"job:a:rate5m", "b"}),
        ("histogram_quantile(0.99, a_bucket) offset 5m", {"a_bucket"}),
        ("scalar(max(a)) - a", {"a"}),
    ],
)
def test_names_are_found_in_a_query(expr: str, names: set[str]) -> None:
    assert queries.metric_names(expr) == names


def test_rules_file_is_read_completely() -> None:
    text = queries.RULES.read_text()
    assert len(queries.rule_queries()) == text.count("expr:")


def test_grafana_provisioning_names_the_dashboards_directory() -> None:
    provider = (DEPLOY / "grafana/provisioning/dashboards/zmqtrain.yml").read_text()
    readme = (DEPLOY / "README.md").read_text()
    assert "path: $ZMQTRAIN_DASHBOARDS" in provider
    assert 'ZMQTRAIN_DASHBOARDS="$PWD/deploy/grafana/dashboards"' in readme


def _expressions(dashboard: dict[str, Any]) -> list[str]:
    panels = [target["expr"] for p in dashboard["panels"] for target in p.get("targets", ())]
    return panels + [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
