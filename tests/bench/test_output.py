"""What a benchmark prints, for scripts and for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from bench.options import STEPS_BEYOND, list_of, sizes_type, steps_for
from bench.output import commit, cpu_model, headline, report

ROWS = [
    {"bench": "train", "ms": 1.23456, "accuracy": 0.5, "ps": 2, "lane": ""},
    {"bench": "train", "ms": 12345.678, "accuracy": None, "ps": 2, "lane": ""},
]


def test_rows_as_json_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    report(ROWS, as_json=True, columns=("ms",))
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ROWS


def test_row_as_json_is_printed_before_the_next_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = []

    def rows() -> Iterator[dict[str, Any]]:
        for row in ROWS:
            yield row
            printed.append(capsys.readouterr().out.count("\n"))

    report(rows(), as_json=True)
    assert printed == [1, 1]


@pytest.mark.parametrize(
    ("rows", "columns", "shared", "expected"),
    [
        (2, ("ms", "accuracy"), [], [["ms", "accuracy"], ["1.235", "0.5"], ["1.235e+04", ""]]),
        (2, ("ps", "ms"), ["ps 2"], [["ms"], ["1.235"], ["1.235e+04"]]),
        (2, (), ["bench train, ps 2"], [["ms", "accuracy"], ["1.235", "0.5"], ["1.235e+04", ""]]),
        (1, ("bench", "ms", "absent"), [], [["bench", "ms", "absent"], ["train", "1.235", ""]]),
    ],
)
def test_table_has_the_columns_asked_for_under_the_machine_and_what_all_rows_share(
    rows: int,
    columns: tuple[str, ...],
    shared: list[str],
    expected: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    report(ROWS[:rows], as_json=False, columns=columns)
    machine, *lines = capsys.readouterr().out.splitlines()
    assert machine == headline()
    assert lines[: len(shared)] == shared
    table = [line.replace("┃", "│").strip("│").split("│") for line in lines if line[0] in "│┃"]
    assert [[cell.strip() for cell in row] for row in table] == expected


def test_table_on_a_terminal_grows_with_each_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which Rich takes anything for a terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    seen = []

    def rows() -> Iterator[dict[str, Any]]:
        for row in ROWS:
            yield row
            seen.append(capsys.readouterr().out)

    report(rows(), as_json=False, columns=("ms",))
    assert "1.235 " in seen[0] and "1.235e+04" not in seen[0]
    assert "1.235e+04" in seen[1]


def test_table_of_no_results_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report([], as_json=False)
    assert capsys.readouterr().out == ""


def test_headline_names_processor_cores_and_memory() -> None:
    assert cpu_model() in headline()
    assert " cores, " in headline() and " GB" in headline()


def test_processor_is_named_as_linux_names_it(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel\t\t: 85\nmodel name\t: A: Processor @ 2 GHz\n\n")
    assert cpu_model(path) == "A: Processor @ 2 GHz"


def test_processor_has_a_name_where_linux_names_none(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\n")
    assert cpu_model(tmp_path / "cpuinfo")
    assert cpu_model(tmp_path / "absent")


def test_commit_is_not_known_outside_a_repository(tmp_path: Path) -> None:
    assert commit(tmp_path) is None


def test_list_is_cut_at_commas_and_each_value_converted() -> None:
    assert sizes_type("0.0003, 13") == (0.0003, 13.0)
    assert list_of(click.Choice(["a", "b"]), "name")("b,a") == ("b", "a")


@pytest.mark.parametrize("text", ["1,x", "", "1,", "0", "-1"])
def test_list_with_a_wrong_value_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        sizes_type(text)


def test_larger_push_pulls_are_repeated_less_often() -> None:
    counts = [steps_for(megabytes) for megabytes in (0.0003, 0.3, 1, 13, 100)]
    assert counts == sorted(set(counts), reverse=True)
    assert steps_for(1e6) == STEPS_BEYOND
