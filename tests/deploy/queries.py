"""The PromQL of the dashboard and the rules, and the names of the metrics that it reads.

For tests that compare queries with what is really exposed, be it by a registry or by a live run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/zmqtrain.json"
RULES = DEPLOY / "prometheus/rules.yml"

_TEMPLATE_VALUES = {"$__rate_interval": "5m", "$job": "zmqtrain", "$instance": ".*"}
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "Inf", "NaN", "inf", "nan"})
_NOT_NAMES = (
    r'"[^"]*"',  # strings
    r"\{[^}]*\}",  # label matchers
    r"\[[^\]]*\]",  # ranges
    r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)",  # label lists
    r"\b\d+[a-z]*\b",  # numbers and durations
)


class Query(NamedTuple):
    """A PromQL expression, and where it stands."""

    where: str
    expr: str


def dashboard_queries(path: Path = DASHBOARD) -> list[Query]:
    """Return the queries of panels, annotations and variables, template variables filled in."""
    dashboard = json.loads(path.read_text())
    return [Query(where, _filled(expr)) for where, expr in _dashboard_expressions(dashboard)]


def rule_queries(path: Path = RULES) -> list[Query]:
    """Return the expressions of the recording and alert rules, each written as ``expr: |``."""
    rules = re.findall(
        r"- (?:record|alert): (\S+)\n +expr: \|\n((?: {10,}\S.*\n)+)", path.read_text()
    )
    return [Query(name, expr) for name, expr in rules]


def recorded_names(path: Path = RULES) -> set[str]:
    """Return the names that the recording rules define."""
    return set(re.findall(r"- record: (\S+)", path.read_text()))


def metric_names(expr: str) -> set[str]:
    """Return the series names that a PromQL expression reads, such as ``x_total``, ``y_bucket``."""
    for pattern in _NOT_NAMES:
        expr = re.sub(pattern, " ", expr)
    words = re.findall(r"[A-Za-z_:][\w:]*(?!\s*\(|[\w:])", expr)
    return set(words) - _WORDS


def exposed_names(exposition: str) -> set[str]:
    """Return the names of the series in a text exposition, and of families that have none yet."""
    names = set(re.findall(r"^([A-Za-z_:][\w:]*)[{ ]", exposition, re.MULTILINE))
    for family, kind in re.findall(r"^# TYPE (\S+) (\S+)$", exposition, re.MULTILINE):
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {family + suffix for suffix in suffixes}
    return names


def _dashboard_expressions(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        match = re.fullmatch(r"label_values\((.+), \w+\)", variable.get("definition", ""))
        if match:
            yield variable["name"], match[1]


def _filled(expr: str) -> str:
    for variable, value in _TEMPLATE_VALUES.items():
        expr = expr.replace(variable, value)
    return expr
