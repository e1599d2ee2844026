"""Training runs of whole processes, as a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from bench import train
from bench.classifier import make_job
from bench.processes import RunError

SUMMARY = {"policy": "hogwild", "ps": 1, "workers": 2, "global_step": 30, "seconds": 0.5}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Commands and settings of the runs; each is faster than the one before."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def fake(command: list[str], *, settings: dict[str, str], timeout_s: float) -> list[Any]:
        started.append((command, settings))
        return [{**SUMMARY, "job": "bench.train_job", "steps_per_second": 100.0 * len(started)}]

    monkeypatch.setattr(train, "json_lines_of", fake)
    return started


@pytest.mark.integration
def test_run_prints_the_summary_of_zmqtrain_run(
    rows_of: Callable[..., list[dict[str, Any]]],
) -> None:
    options = "--job digits --hidden 0 --batch-size 5 --steps 30 --workers 1 --rule sgd"
    (row,) = rows_of("train", *options.split())
    assert (row["bench"], row["job"], row["hidden"], row["rule"]) == ("train", "digits", 0, "sgd")
    assert (row["global_step"], row["examples"], row["workers"]) == (30, 150, 1)
    assert row["steps_per_second"] > 0 and row["exit_code"] == 0
    assert {"accuracy", "staleness", "pushes", "parameters_sha256"} < set(row)


@pytest.mark.integration
def test_run_that_fails_is_told_with_its_reason(invoke: Callable[..., Result]) -> None:
    result = invoke("train", "--job", "digits", "--policy", "sometimes")
    assert result.exit_code == 1
    assert "zmqtrain run ended with exit code 2" in result.stderr
    assert "sometimes" in result.stderr


@pytest.mark.usefixtures("runs")
def test_every_run_is_a_line_of_json(rows_of: Callable[..., list[dict[str, Any]]]) -> None:
    rates = [row["steps_per_second"] for row in rows_of("train", "--runs", "3")]
    assert rates == [100.0, 200.0, 300.0]


@pytest.mark.usefixtures("runs")
def test_table_ends_with_the_median_and_the_spread(invoke: Callable[..., Result]) -> None:
    last = invoke("train", "--runs", "3").stdout.splitlines()[-1]
    assert last == "steps a second: median 200, best 300, worst 100"


def test_options_reach_the_job_and_the_cluster(
    runs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rows_of: Callable[..., list[dict[str, Any]]],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--hidden 1 --batch-size 7 --ps 2 --workers 3 --policy sync-replicas --steps 9"
    rows_of("train", *options.split(), "--data", "here")
    [(command, settings)] = runs
    given = dict(zip(command[6::2], command[7::2], strict=True))
    assert given == {
        "--batch-size": "7",
        "--ps": "2",
        "--workers": "3",
        "--policy": "sync-replicas",
        "--steps": "9",
        "--data": str(tmp_path / "here"),
    }
    assert settings == {"BENCH_JOB": "mnist", "BENCH_HIDDEN": "1", "BENCH_RULE": "adam"}


def test_failure_of_a_run_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Result]
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise RunError("took over 5 s")

    monkeypatch.setattr(train, "json_lines_of", fail)
    result = invoke("train")
    assert (result.exit_code, result.stderr) == (1, "Error: zmqtrain run took over 5 s\n")


@pytest.mark.parametrize(
    ("name", "hidden", "shapes"),
    [
        ("mnist", 100, [(784, 100), (100,), (100, 10), (10,)]),
        ("mnist", 1, [(784, 1), (1,), (1, 10), (10,)]),
        ("mnist", 0, [(784, 10), (10,)]),
        ("digits", 64, [(64, 64), (64,), (64, 10), (10,)]),
    ],
)
def test_network_has_the_layers_asked_for(
    name: str, hidden: int, shapes: list[tuple[int, ...]]
) -> None:
    parameters = make_job(name, hidden, "adam").model.parameters(seed=0)
    assert [value.shape for value in parameters.values()] == shapes


def test_help_names_every_benchmark(invoke: Callable[..., Result]) -> None:
    text = invoke("--help").stdout
    for name in ("push-pull", "kernels", "train", "peers", "memory", "profile", "compression"):
        assert f"  {name} " in text
