"""Runs the tests that need a GPU."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.output import ROOT
from zmqtrain.compute.threads import usable_cores

END_S = 15.0  # for pytest to write its report after a signal
PROCESSES = 8  # at most, that share the device


def run(seconds: float, log: Path) -> dict[str, Any]:
    """Return how the tests ended; those that are late are left out. pytest's output is in ``log``.

    Raises:
        RuntimeError: there is no report.
    """
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider", "-W", "default", "--tb=short", *_files()]
        if find_spec("xdist"):
            command += ["-n", str(min(PROCESSES, usable_cores()))]
        pytest = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        late = False
        try:
            pytest.wait(seconds - END_S)
        except subprocess.TimeoutExpired:
            late = True
            pytest.send_signal(signal.SIGINT)
            pytest.wait(END_S)
        if not report.exists():
            last = log.read_text().strip().splitlines()[-1:]
            raise RuntimeError(f"pytest ended with exit code {pytest.returncode}: {last}")
        row = result_of(ElementTree.parse(report).getroot())
    return row | ({"note": f"stopped after {seconds - END_S:.0f} s"} if late else {})


def result_of(report: ElementTree.Element) -> dict[str, Any]:
    """Return the numbers of a report in JUnit's form, and the names of what failed."""
    ended: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in report.iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped"
        ended[kind if kinds & {"failure", "error", "skipped"} else "passed"].append(
            f"{case.get('classname')}::{case.get('name')}"
        )
    return {name: len(names) for name, names in ended.items()} | {"failures": ended["failed"]}


def _files() -> Iterator[str]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.gpu" in path.read_text():
            yield str(path.relative_to(ROOT))
