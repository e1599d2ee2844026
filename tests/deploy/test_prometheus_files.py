from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy import queries
from zmqtrain.local.processes import METRICS_PORT

PROMETHEUS = Path(__file__).parents[2] / "deploy/prometheus"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is absent")


def promtool(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, timeout=60)


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", PROMETHEUS / "prometheus.yml"),
        ("check", "rules", PROMETHEUS / "rules.yml"),
        ("test", "rules", PROMETHEUS / "rules_test.yml"),
    ],
    ids=["config", "rules", "alerts"],
)
def test_file_for_prometheus_passes_promtool(command: tuple[str | Path, ...]) -> None:
    result = promtool(*command)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_every_query_of_the_dashboard_parses(tmp_path: Path) -> None:
    rules = ["groups:", "  - name: dashboard", "    rules:"]
    for number, query in enumerate(queries.dashboard_queries()):
        rules += [f"      - record: query:{number}", f"        expr: {query.expr!r}"]
    path = tmp_path / "dashboard.yml"
    path.write_text("\n".join(rules) + "\n")
    result = promtool("check", "rules", path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    tests = (PROMETHEUS / "rules_test.yml").read_text()
    alerts = {query.where for query in queries.rule_queries()} - queries.recorded_names()
    untested = {
        alert for alert in alerts if f"alertname: {alert}\n        exp_alerts:" not in tests
    }
    assert alerts and not untested


def test_default_ports_of_all_roles_are_scraped() -> None:
    text = (PROMETHEUS / "prometheus.yml").read_text()
    ports = [9400, *range(9410, 9414), *range(9450, 9458)]
    assert [port for port in ports if f"- 127.0.0.1:{port}\n" not in text] == []
    assert f"http://127.0.0.1:{METRICS_PORT}/sd" in text
