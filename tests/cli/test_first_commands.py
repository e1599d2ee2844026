"""The commands of the first day: a machine is examined, and a job file is written."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from zmqtrain.cli import doctor
from zmqtrain.cli.init import FRAMEWORKS
from zmqtrain.cli.main import main
from zmqtrain.errors import ExitCode

PRICES = "area,rooms,price\n" + "".join(f"{n}.5,{n % 5},{3 * n}.25\n" for n in range(40))
KINDS = "a,b,kind\n" + "".join(f"{n}.5,{n % 5}.0,{n % 3}\n" for n in range(40))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "prices.csv").write_text(PRICES)
    (tmp_path / "kinds.csv").write_text(KINDS)
    return tmp_path


def job_in(path: Path) -> Any:
    names: dict[str, Any] = {"__name__": "job"}
    exec(path.read_text(), names)
    return names["job"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("data", ["digits", "prices.csv", "kinds.csv"])
def test_written_job_runs_as_it_is(framework: str, data: str, here: Path) -> None:
    for needed in {framework, "pyarrow"} if data != "digits" else {framework}:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    assert main(["init", "net_of_mine.py", "--framework", framework, "--data", data]) == ExitCode.OK
    summary = zmqtrain.run(job_in(here / "net_of_mine.py").with_overrides(epochs=1))
    assert np.isfinite(summary.loss)
    assert np.isnan(summary.accuracy) == (data == "prices.csv")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["taken.py"], "exists already"),
        (["random.py"], "would hide the module random"),
        (["net"], "expected a name such as net.py"),
        (["net_of_mine.py", "--data", "table.xlsx"], "docs/data.md"),
        (["no/dir/net_of_mine.py", "--data", "digits"], "make the directory"),
    ],
)
def test_init_refuses_what_would_not_run(
    arguments: list[str], complaint: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "taken.py").write_text("mine")
    assert main(["init", *arguments]) == ExitCode.USAGE
    assert complaint in capsys.readouterr().err
    assert (here / "taken.py").read_text() == "mine"


def test_doctor_trains_and_says_what_it_has_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith("ok") for line in lines[1:])
    assert "20 steps of two workers" in lines[-1]


def test_doctor_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (64, 64))
    assert main(["doctor"]) == ExitCode.USAGE
    assert "may open 64 files; expected 256 or more" in capsys.readouterr().out
