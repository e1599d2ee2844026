"""`zmqtrain placement`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.cli.main import main
from zmqtrain.cli.output import text_of
from zmqtrain.cli.placement import described, placement_view
from zmqtrain.errors import ExitCode
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place

JOB = """
from zmqtrain import Job
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import SGD

job = Job(
    model=MLP(features=64, hidden=32, classes=10), data=Digits(), optimizer=SGD(learning_rate=0.1)
)
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return str(path)


def placement_of(
    shapes: dict[str, tuple[int, ...]], ps: int, partition_nbytes: int
) -> dict[str, Any]:
    variables = tuple(Variable(name, shape) for name, shape in shapes.items())
    return described(variables, place(variables, ps, partition_nbytes=partition_nbytes))


def test_view_shows_rows_in_the_order_of_variables_and_totals() -> None:
    placement = placement_of({"z": (5, 100), "scale": (), "bias": (20,)}, 2, 1000)
    assert text_of(placement_view(placement)).splitlines() == [
        "variable  shape    rows  ps  device    size",
        "z         5 x 100  0..2   0  cpu     1.2 kB",
        "z         5 x 100  3..4   1  cpu      800 B",
        "scale     scalar   -      1  cpu        4 B",
        "bias      20       all    1  cpu       80 B",
        "",
        "ps  slices    size   share",
        " 0       1  1.2 kB  57.6 %",
        " 1       3   884 B  42.4 %",
        "",
        "2.1 kB of parameters; the largest part is 1.15 times the mean",
    ]


def test_view_names_the_ps_that_hold_nothing() -> None:
    placement = placement_of({"w": (4,)}, 3, 0)
    assert text_of(placement_view(placement)).splitlines()[-1] == (
        "16 B of parameters; the largest part is 3.00 times the mean; ps 1, ps 2 hold nothing: use "
        "fewer ps, or a smaller --partition-nbytes"
    )


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.lists(st.integers(1, 9), max_size=3).map(tuple),
        min_size=1,
    ),
    st.integers(1, 6),
    st.integers(0, 64),
)
def test_json_holds_every_row_of_every_variable_once(
    shapes: dict[str, tuple[int, ...]], ps: int, partition_nbytes: int
) -> None:
    answer = placement_of(shapes, ps, partition_nbytes)
    rows = [
        (chunk["variable"], row)
        for chunk in answer["slices"]
        for row in range(chunk["start"], chunk["start"] + chunk["rows"])
    ]
    assert rows == [
        (name, row) for name, shape in shapes.items() for row in range(shape[0] if shape else 1)
    ]
    assert sum(chunk["nbytes"] for chunk in answer["slices"]) == answer["nbytes"]
    assert sum(shard["nbytes"] for shard in answer["ps"]) == answer["nbytes"]
    assert 1 <= answer["balance"] <= ps + 1e-9


def test_job_is_placed_by_its_file_and_the_options(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--ps", "2", "--placement", "round-robin", "--partition-nbytes", "4096", "--json"]
    assert main(["placement", job, *options]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["job"] == job
    assert (answer["placement"], answer["partition_nbytes"]) == ("round-robin", 4096)
    assert [(p["variable"], p["start"], p["ps"]) for p in answer["slices"]] == [
        ("layer0/weights", 0, 0),
        ("layer0/weights", 32, 1),
        ("layer0/bias", 0, 0),
        ("layer1/weights", 0, 1),
        ("layer1/bias", 0, 0),
    ]


@pytest.mark.parametrize(("partition_nbytes", "ps"), [(64, [0, 1, 2]), (1 << 18, [0])])
def test_without_ps_the_workers_that_have_a_part_are_shown(
    job: str, partition_nbytes: int, ps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--ps", "0", "--workers", "3", "--partition-nbytes", str(partition_nbytes)]
    assert main(["placement", job, *options, "--json"]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["placement"] == "contiguous"
    assert [each["ps"] for each in answer["ps"]] == ps


def test_variable_decides_as_it_does_for_the_tasks(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZMQTRAIN_PLACEMENT", "round-robin")
    assert main(["placement", job, "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["placement"] == "round-robin"
