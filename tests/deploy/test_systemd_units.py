"""systemd restarts tasks in the cases in which `zmqtrain supervise` does."""

from __future__ import annotations

import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from zmqtrain.config.restarts import USUAL_LIMITS, Advice, advice
from zmqtrain.errors import ExitCode

UNITS = sorted((Path(__file__).parents[2] / "deploy/systemd").glob("*.service"))


def codes(advised: Advice) -> list[str]:
    return [str(int(code)) for code in sorted(ExitCode) if advice(code) is advised]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_restarts_after_the_codes_of_the_table(path: Path) -> None:
    unit = ConfigParser(interpolation=None, strict=False)  # a filter has two lines
    unit.read_string(path.read_text())
    service = unit["Service"]
    assert service["Restart"] == "on-failure"  # of codes beside 0, and of signals that kill
    assert service["RestartPreventExitStatus"].split() == codes(Advice.NO)
    assert service["SuccessExitStatus"].split() == codes(Advice.ELSEWHERE)
    assert unit.getint("Unit", "StartLimitBurst") == USUAL_LIMITS.max_restarts + 1
    assert unit.getfloat("Unit", "StartLimitIntervalSec") == USUAL_LIMITS.within_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is absent")
def test_units_are_valid(tmp_path: Path) -> None:
    paths = []
    for unit in UNITS:
        # An instance of a template, whose program and user are there.
        path = tmp_path / unit.name.replace("@", "@0")
        path.write_text(unit.read_text().replace("/opt/zmqtrain/bin/python", "/bin/true"))
        paths.append(path)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is absent")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_exposes_little_of_its_host(path: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=30", str(path)]
    rated = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert rated.returncode == 0, rated.stdout


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_allows_what_a_task_needs(path: Path) -> None:
    unit = ConfigParser(interpolation=None, strict=False)  # a filter has two lines
    unit.read_string(path.read_text())
    service = unit["Service"]
    assert service["ProtectSystem"] == "strict"
    assert "SystemCallFilter=@system-service" in path.read_text()
    assert {service["WorkingDirectory"], "/tmp"} <= set(service["ReadWritePaths"].split())
    # Updates are compiled; GPUs are devices; the command line finds jobs by files in /tmp.
    assert not {"MemoryDenyWriteExecute", "PrivateDevices", "PrivateTmp"} & {*service}
