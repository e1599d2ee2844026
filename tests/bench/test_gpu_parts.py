"""The parts of `bench gpu`, on the CPU or on a stand-in for CuPy, and failures of parts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

import zmqtrain
from bench.__main__ import main
from bench.gpu import cases, command, copies, training, updates
from bench.gpu.__main__ import print_rows
from bench.gpu.command import Command, compared, page
from bench.kernels import TORCH
from tests.constants import Constants
from tests.cupy_stand_in import installed
from tests.modules import Modules
from zmqtrain.data import Digits
from zmqtrain.optim import AdamW


@pytest.fixture
def few_rounds(constants: Constants) -> None:
    constants(cases, WARM_UP=1, LEAST=1, MOST=1)


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[dict[str, Any]]:
    print_rows(*arguments)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("few_rounds")
def test_copies_are_measured_in_every_direction_and_leave_nothing_registered(
    constants: Constants, capsys: pytest.CaptureFixture[str]
) -> None:
    constants(copies, NBYTES={"4 KB": 1 << 12})
    with installed(1) as cupy:
        cupy.cuda.runtime.hostRegister = register = Mock()
        cupy.cuda.runtime.hostUnregister = unregister = Mock()
        rows = printed(capsys, copies.cases())
    assert not [row["error"] for row in rows if "error" in row]
    assert len(rows) == 7
    assert all(row["median_us"] > 0 and row["gb_per_second"] > 0 for row in rows)
    taken, released = register.call_args_list, unregister.call_args_list
    assert [call.args[0] for call in taken] == [call.args[0] for call in released]
    assert len(taken) == 6


@pytest.mark.usefixtures("few_rounds")
def test_updates_of_every_rule_are_compared_with_a_copy(
    modules: Modules, capsys: pytest.CaptureFixture[str]
) -> None:
    modules("torch", None)
    copy, *rows = printed(capsys, updates.cases("cpu", "0.01"))
    assert [row["rule"] for row in rows] == list(updates.MEASURED)
    for row in rows:
        share = row["memory_gb_per_second"] / copy["memory_gb_per_second"]
        assert row["percent_of_copy"] == pytest.approx(100 * share)
        assert row["ms"] > 0 and row["alone_ms"] > 0
        assert ("import of torch halted" in row.get("torch_foreach", "")) == (row["rule"] in TORCH)


def test_case_that_fails_has_a_row_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("first line\nsecond line")

    rows = printed(capsys, [({"rule": "a"}, fail), ({"rule": "b"}, lambda: {"ms": 1.0})])
    assert rows == [{"rule": "a", "error": "ValueError: first line"}, {"rule": "b", "ms": 1.0}]


@pytest.mark.integration
def test_command_that_is_late_or_fails_gives_the_rows_that_it_had_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endings = {"late": "time.sleep(60)", "failing": "sys.exit('no device')"}
    for name, ending in endings.items():
        code = f"import sys, time\nprint('{{\"row\": 1}}', flush=True)\n{ending}\n"
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = [[*Command({"rule": name}, (name,)).rows(seconds=2.0)] for name in endings]
    assert found == [
        [{"row": 1}, {"rule": "late", "error": "took over 2 s"}],
        [{"row": 1}, {"rule": "failing", "error": "ended with exit code 1: no device"}],
    ]


def test_part_that_fails_is_reported_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        command,
        "rows_of",
        lambda part, until, **options: [
            {"bench": "gpu", "part": part, **({"error": "x"} if part == "copies" else {"ms": 2.0})}
        ],
    )
    arguments = ["gpu", "--device", "cpu", "--parts", "copies,updates", "--output", str(tmp_path)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == ["machine", "copies", "updates"]
    assert (tmp_path / "gpu.md").read_text() == page(rows)
    assert "### copies\n\n- error x\n\n### updates\n\nms 2\n" in done.stdout


def test_page_has_a_table_of_what_is_measured_and_a_list_of_the_rest() -> None:
    rows: list[dict[str, Any]] = [
        {"bench": "gpu", "part": "updates", "size": 1, "rule": "sgd", "ms": 0.12345},
        {"bench": "gpu", "part": "updates", "size": 1, "rule": "adam", "ms": 2.0},
        {"bench": "gpu", "part": "updates", "rule": "lion", "skipped": "no time was left"},
    ]
    assert page(rows) == (
        "### updates\n\nsize 1\n\n| rule | ms |\n| --- | --- |\n| sgd | 0.1235 |\n| adam | 2 |\n\n"
        "- rule lion, skipped no time was left\n"
    )


def test_training_of_ours_has_the_losses_of_the_plain_loop(
    modules: Modules, constants: Constants
) -> None:
    pytest.importorskip("torch")
    import torch

    from zmqtrain.adapters.torch import TorchModel

    model = TorchModel(lambda: torch.nn.Linear(64, 10), torch.nn.functional.cross_entropy)
    example = ModuleType("tests_example")
    example.job = zmqtrain.Job(model=model, data=Digits(), optimizer=AdamW(0.01))  # type: ignore[attr-defined]
    modules(example.__name__, example)
    constants(training, MODELS={"cnn": (example.__name__, "job")})
    plain, ours = (training.measure("cnn", side, 4, "cpu") for side in ("plain", "alone"))
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert plain["losses"][0] != plain["losses"][-1]


def test_sides_are_compared_with_the_plain_loop() -> None:
    sides = [
        {"model": "cnn", "side": "plain", "steps_per_second": 10.0, "losses": [3.0, 2.0]},
        {"model": "cnn", "side": "alone", "steps_per_second": 5.0, "losses": [3.0, 2.5]},
    ]
    plain, alone = (compared(side, sides[0]) for side in sides)
    assert (plain["ratio"], plain["max_difference"]) == (1.0, 0.0)
    assert (alone["ratio"], alone["max_difference"]) == (0.5, 0.5)
    assert alone["compared_with"] == "plain"
    assert "losses" not in alone
