"""Runs the tests that need a GPU."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.gpu.cases import Case
from bench.output import ROOT
from zmqtrain.compute.threads import usable_cores

END_S = 15.0  # for pytest to write its report after a signal
PROCESSES = 8  # at most, that share the device


def cases(seconds: str, log: str) -> Iterator[Case]:
    """Yield the only one; pytest's output goes to ``log``."""
    yield {}, partial(_run, float(seconds) - END_S, Path(log))


def _run(seconds: float, log: Path) -> dict[str, Any]:
    marked = [path for path in (ROOT / "tests").rglob("*.py") if "mark.gpu" in path.read_text()]
    # A conftest marks parameters of fixtures, which the tests of its whole folder may use.
    files = [path.parent if path.name == "conftest.py" else path for path in marked]
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider", "-W", "default", "--tb=short", *map(str, files)]
        if find_spec("xdist"):
            command += ["-n", str(min(PROCESSES, usable_cores()))]
        pytest = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        row = {}
        try:
            pytest.wait(seconds)
        except subprocess.TimeoutExpired:
            row = {"error": f"stopped after {seconds:.0f} s"}
            pytest.send_signal(signal.SIGINT)
            pytest.wait(END_S)
        if not report.exists():
            last = log.read_text().strip().splitlines()[-1:]
            raise RuntimeError(f"pytest ended with exit code {pytest.returncode}: {last}")
        return result_of(ElementTree.parse(report).getroot()) | row


def result_of(report: ElementTree.Element) -> dict[str, Any]:
    """Return the numbers of a report in JUnit's form, and the names of what failed."""
    ended: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    of_child = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    for case in report.iter("testcase"):
        ends = {of_child[child.tag] for child in case if child.tag in of_child}
        name = f"{case.get('classname')}::{case.get('name')}"
        ended[min(ends, default="passed")].append(name)
    return {name: len(names) for name, names in ended.items()} | {"failures": ended["failed"]}
