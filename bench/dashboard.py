"""The queries of the Grafana dashboard, answered by a real Prometheus that scrapes a run."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil
import yaml

from bench.peers.shared import free_ports
from bench.plot import INK, QUIET, tidy, writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEPLOY = Path(__file__).parents[1] / "deploy"
CONFIG = DEPLOY / "prometheus/prometheus.yml"
DASHBOARD = DEPLOY / "grafana/dashboards/zmqtrain.json"
RATE_INTERVAL = "6s"  # Grafana chooses some four scrapes
JOB = "examples/digits.py"
FLAGS = "--ps 2 --workers 3 --policy bounded-staleness:4 --evaluate-every 1000 --save-secs 5"
STEPS = 1_000_000  # more than there is time for
START_S = 60.0
PANELS = (
    ("Global step", "Loss", "Accuracy", "Tasks by state"),
    ("Where a step goes", "Step duration", "Step duration by worker", "Stragglers"),
    ("Staleness, quantiles", "Worker spread and its bound", "Updates by ps", "CPU"),
)
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")
DPI = 100
COLOURS_IN_FILE = 64
GAP_S = 2.0  # a line is interrupted where there was nothing to scrape


class Prometheus:
    """A Prometheus with the shipped configuration and rules, which scrapes one run each second."""

    def __init__(self, directory: Path, run_port: int, alertmanager: str = "") -> None:
        """``run_port``: of the run's metrics. ``alertmanager``: host:port; alerts come at once."""
        config = yaml.safe_load(CONFIG.read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (scrape,) = config["scrape_configs"]
        del scrape["static_configs"]  # other jobs may run on this machine
        url = f"http://127.0.0.1:{run_port}/sd"
        scrape["http_sd_configs"] = [{"url": url, "refresh_interval": "1s"}]
        rules = yaml.safe_load(CONFIG.with_name("rules.yml").read_text())
        if alertmanager:
            config["alerting"] = {
                "alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]
            }
            for rule in (rule for group in rules["groups"] for rule in group["rules"]):
                rule.pop("for", None)
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        (directory / "rules.yml").write_text(yaml.safe_dump(rules))
        (self.port,) = free_ports(1)
        self._words = [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=error",
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        with started(self._words):
            yield

    def ask(self, path: str, **parameters: object) -> Any:
        """Return the data that the API answers with.

        Raises:
            OSError: it does not answer, or finds a mistake in the question.
        """
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def scraped(self) -> list[str]:
        """Return the addresses of the tasks that it scrapes."""
        try:
            targets = self.ask("targets", state="active")["activeTargets"]
        except OSError:
            return []
        return [each["labels"]["instance"] for each in targets if each["health"] == "up"]


@contextmanager
def started(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program for as long as the block runs."""
    with subprocess.Popen(words, **options) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def run_words(port: int, logdir: str | Path) -> list[str]:
    """Return the command of a run with its metrics at this port."""
    words = [sys.executable, "-P", "-m", "zmqtrain", "run", JOB, "--steps", str(STEPS)]
    return [*words, *FLAGS.split(), "--metrics-port", str(port), "--logdir", str(logdir)]


def panels_of(path: Path = DASHBOARD) -> dict[str, dict[str, Any]]:
    """Return the dashboard's panels by title."""
    return {each["title"]: each for each in json.loads(path.read_text())["panels"]}


def filled(expression: str) -> str:
    """Return a query of the dashboard with its variables filled in."""
    values = {"$__rate_interval": RATE_INTERVAL, "$job": "zmqtrain", "$instance": ".*"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression


@click.command("dashboard")
@click.option("--seconds", type=click.FloatRange(min=20), default=60.0, help="how long it trains")
@click.option(
    "--plot", type=click.Path(path_type=Path), callback=writable, required=True, metavar="FILE.png"
)
def dashboard_command(seconds: float, plot: Path) -> None:
    """Draw what the Grafana dashboard asks of a Prometheus that scrapes a run.

    A worker is killed halfway. Needs a prometheus on PATH.
    """
    if shutil.which("prometheus") is None:
        raise click.ClickException("there is no prometheus on PATH; Debian's package has that name")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (port,) = free_ports(1)
        prometheus = Prometheus(directory, port)
        stack.enter_context(prometheus.running())
        began = time.time()
        run = stack.enter_context(
            started(run_words(port, directory / "logdir"), stderr=subprocess.DEVNULL)
        )
        while len(prometheus.scraped()) < 6:  # 2 ps, 3 workers, the chief
            if run.poll() is not None or time.time() > began + START_S:
                raise click.ClickException(f"Prometheus did not see the run in {START_S:g} s")
            time.sleep(0.5)
        time.sleep(seconds / 2)
        kill_worker(run.pid)
        time.sleep(seconds / 2)
        answers = {
            title: _answers(prometheus, panels_of()[title], began, time.time())
            for row in PANELS
            for title in row
        }
    _draw(plot, answers)
    click.echo(f"{plot}: {plot.stat().st_size // 1000} kB")


def kill_worker(run: int) -> None:
    """Kill a worker of the run that is this process; it is started again."""
    tasks = psutil.Process(run).children(recursive=True)
    next(task for task in tasks if task.name() == "zmqtrain worker").kill()


def _answers(
    prometheus: Prometheus, panel: dict[str, Any], began: float, ended: float
) -> dict[str, list[tuple[float, float]]]:
    """Return the series that a panel would show, by their legend: seconds of the run, value."""
    series: dict[str, list[tuple[float, float]]] = {}
    for target in panel["targets"]:
        query = filled(target["expr"])
        data = prometheus.ask("query_range", query=query, start=began, end=ended, step=1)
        for found in data["result"]:
            name = target["legendFormat"]
            for label in re.findall(r"{{(\w+)}}", name):
                name = name.replace(f"{{{{{label}}}}}", found["metric"].get(label, ""))
            points = [(at - began, float(value)) for at, value in found["values"]]
            series[name] = series.get(name, []) + points
    return {name: sorted(points) for name, points in sorted(series.items())}


def _draw(path: Path, answers: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(14, 8), facecolor="white", layout="constrained")
    grid = figure.subplots(len(PANELS), len(PANELS[0]), sharex=True)
    for axes, title in zip(grid.flat, (title for row in PANELS for title in row), strict=True):
        _draw_panel(axes, title, answers[title])
    for axes in grid[-1]:
        axes.set_xlabel("seconds", fontsize=8, color=QUIET)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    Image.open(drawn).quantize(COLOURS_IN_FILE).save(path, optimize=True)


def _draw_panel(axes: Axes, title: str, series: dict[str, list[tuple[float, float]]]) -> None:
    unit = panels_of()[title]["fieldConfig"]["defaults"].get("unit")
    factor, suffix = {
        "s": (1000.0, ", ms"),
        "percentunit": (100.0, ", %"),
        "ops": (1.0, ", per s"),
    }.get(unit, (1.0, ""))
    for (name, points), colour in zip(series.items(), cycle(COLOURS), strict=False):
        gaps = [
            (at + 1, math.nan) for (at, _), (after, _) in pairwise(points) if after > at + GAP_S
        ]
        times, values = zip(*sorted([*points, *gaps]), strict=True)
        shown = [factor * value for value in values]
        axes.plot(times, shown, label=name, color=colour, linewidth=1.1)
    axes.set_title(title + suffix, fontsize=9, loc="left", color=INK)
    tidy(axes)
    if len(series) > 1:
        axes.legend(fontsize=6.5, frameon=False, ncols=2)
