"""Bytes, speed and accuracy by compression."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from bench import compression
from bench.__main__ import main
from bench.training import Training

SUMMARY = SimpleNamespace(steps_per_second=100.0, accuracy=0.5, loss=1.0)


class FakeCounting:
    """Has counted 3 workers' pushes."""

    def __call__(self, status: object) -> None: ...

    def sum(self, tasks: str, name: str) -> float:
        assert tasks == "worker"
        return {"steps_total": 30, "bytes_sent_total": 3010, "bytes_received_total": 600}[name]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What the runs were told beside their training; no process is started."""
    started: list[dict[str, str]] = []

    def fake(self: Training, look: Any, **options: str) -> Any:
        started.append(options)
        return SUMMARY

    monkeypatch.setattr(Training, "run", fake)
    monkeypatch.setattr(compression, "Counting", FakeCounting)
    return started


@pytest.mark.integration
def test_compressed_gradients_take_fewer_bytes_and_parameters_as_many() -> None:
    specs = "--compression none,fp16,topk:ratio=0.01".split()
    options = "--hidden 0 --steps 100 --workers 1 --rule sgd --json".split()
    result = CliRunner().invoke(main, ["compression", *specs, *options])
    assert result.exit_code == 0, result.stderr
    none, half, top = map(json.loads, result.stdout.splitlines())
    parameters_nbytes = 4 * (64 + 1) * 10
    assert none["sent_bytes_per_push"] > parameters_nbytes
    assert none["sent_bytes_per_push"] - half["sent_bytes_per_push"] > 0.4 * parameters_nbytes
    assert half["sent_bytes_per_push"] - top["sent_bytes_per_push"] > 0.4 * parameters_nbytes
    received = min(row["received_bytes_per_push"] for row in (none, half, top))
    assert received > 0.9 * parameters_nbytes, "the last replies may not be counted yet"
    assert none["bench"] == "compression" and top["compression"] == "topk:ratio=0.01"
    assert 0 < none["accuracy"] <= 1 and none["steps_per_second"] > 0


def test_bytes_are_shared_out_over_the_pushes(runs: list[dict[str, str]]) -> None:
    result = CliRunner().invoke(main, ["compression", "--compression", "int8", "--json"])
    row = json.loads(result.stdout)
    assert (row["sent_bytes_per_push"], row["received_bytes_per_push"]) == (100, 20)
    assert (row["steps_per_second"], row["accuracy"], row["loss"]) == (100.0, 0.5, 1.0)


def test_compressions_take_turns_on_lane_tcp(runs: list[dict[str, str]]) -> None:
    options = ["--compression", "none,bf16", "--policy", "sync-replicas", "--runs", "2"]
    result = CliRunner().invoke(main, ["compression", *options])
    assert result.exit_code == 0, result.stderr
    assert [run["compression"] for run in runs] == ["none", "bf16"] * 2
    assert {(run["lane"], run["policy"]) for run in runs} == {("tcp", "sync-replicas")}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--compression", "none,zip"], "unknown compression 'zip'"),
        (["--compression", "topk:ratio=2"], "the share '2'"),
        (["--policy", "sometimes"], "unknown policy 'sometimes'"),
        (["--runs", "0"], "--runs"),
    ],
)
def test_wrong_option_is_refused_before_anything_runs(
    arguments: list[str], expected: str, runs: list[dict[str, str]]
) -> None:
    result = CliRunner().invoke(main, ["compression", *arguments])
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())
    assert runs == []
