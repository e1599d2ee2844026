"""A real Prometheus, and a real Alertmanager, watch a run by the shipped files."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from bench.dashboard import Prometheus, run_words, started
from bench.peers.shared import free_ports
from tests.deploy import queries
from tests.harness import until

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("prometheus-alertmanager") is None,
        reason="prometheus or prometheus-alertmanager is absent",
    ),
]
ROUTE = "route: {receiver: nobody}\nreceivers: [{name: nobody}]\n"


def test_run_is_found_and_shown_and_its_death_reaches_the_alertmanager(tmp_path: Path) -> None:
    run_port, alerts_port = free_ports(2)
    (tmp_path / "alertmanager.yml").write_text(ROUTE)
    alertmanager = [
        "prometheus-alertmanager",
        f"--config.file={tmp_path / 'alertmanager.yml'}",
        f"--storage.path={tmp_path / 'alerts'}",
        f"--web.listen-address=127.0.0.1:{alerts_port}",
        "--cluster.listen-address=",
    ]

    def fired() -> set[str]:
        url = f"http://127.0.0.1:{alerts_port}/api/v2/alerts"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return {alert["labels"]["alertname"] for alert in json.load(answer)}

    prometheus = Prometheus(tmp_path, run_port, f"127.0.0.1:{alerts_port}")
    with (
        started(alertmanager, stderr=subprocess.DEVNULL),
        prometheus.running(),
        started(run_words(run_port, tmp_path / "logdir"), stderr=subprocess.DEVNULL) as run,
    ):
        tasks = 6  # 2 ps, 3 workers, the chief
        until(lambda: len(prometheus.scraped()) == tasks, "all tasks", lambda: "")
        asked = [query.expr for query in queries.dashboard_queries()]
        for expression in asked:
            prometheus.ask("query", query=expression)  # raises if it is wrong
        assert "ZmqtrainRunDied" not in fired()
        run.kill()
        until(lambda: "ZmqtrainRunDied" in fired(), "the alert", lambda: str(fired()))


def test_prometheus_sees_the_end_of_a_run(tmp_path: Path) -> None:
    (run_port,) = free_ports(1)
    prometheus = Prometheus(tmp_path, run_port)

    def value(query: str) -> list[float]:
        return [float(each["value"][1]) for each in prometheus.ask("query", query=query)["result"]]

    words = run_words(run_port, tmp_path / "logdir")
    with prometheus.running(), started(words, stderr=subprocess.DEVNULL) as run:
        until(lambda: prometheus.scraped(), "some task", lambda: "")
        until(lambda: value("zmqtrain_global_step > 0"), "a step", lambda: "")
        run.send_signal(signal.SIGINT)  # as at any end: the chief tells all tasks
        run.wait()
        ended = value("max(last_over_time(zmqtrain_ended_timestamp_seconds[5m])) > 0")
        assert ended == [pytest.approx(time.time(), abs=60)]
        until(lambda: not value("zmqtrain_global_step"), "its metrics are gone", lambda: "")
        rule = next(each for each in queries.rule_queries() if each.where == "ZmqtrainRunDied")
        assert value(rule.expr) == []
