"""Bytes, speed and accuracy by compression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench import compression

RowsOf = Callable[..., list[dict[str, Any]]]


class FakeCounting:
    """Has counted 3 workers' pushes."""

    def __call__(self, status: object) -> None: ...

    def sum(self, tasks: str, name: str) -> float:
        assert tasks == "worker"
        return {"steps_total": 30, "bytes_sent_total": 3010, "bytes_received_total": 600}[name]


@pytest.fixture
def runs(trainings: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    monkeypatch.setattr(compression, "Counting", FakeCounting)
    return trainings


@pytest.mark.integration
def test_compressed_gradients_take_fewer_bytes_and_parameters_as_many(rows_of: RowsOf) -> None:
    specs = "--compression none,fp16,topk:ratio=0.01".split()
    options = "--hidden 0 --steps 100 --workers 1 --rule sgd".split()
    none, half, top = rows_of("compression", *specs, *options)
    parameters_nbytes = 4 * (64 + 1) * 10
    assert none["sent_bytes_per_push"] > parameters_nbytes
    assert none["sent_bytes_per_push"] - half["sent_bytes_per_push"] > 0.4 * parameters_nbytes
    assert half["sent_bytes_per_push"] - top["sent_bytes_per_push"] > 0.4 * parameters_nbytes
    received = min(row["received_bytes_per_push"] for row in (none, half, top))
    assert received > 0.9 * parameters_nbytes, "the last replies may not be counted yet"
    assert none["bench"] == "compression" and top["compression"] == "topk:ratio=0.01"
    assert 0 < none["accuracy"] <= 1 and none["steps_per_second"] > 0


@pytest.mark.usefixtures("runs")
def test_bytes_are_shared_out_over_the_pushes(rows_of: RowsOf) -> None:
    (row,) = rows_of("compression", "--compression", "int8")
    assert (row["sent_bytes_per_push"], row["received_bytes_per_push"]) == (100, 20)
    assert (row["steps_per_second"], row["accuracy"], row["loss"]) == (100.0, 0.5, 1.0)


def test_compressions_take_turns_on_lane_tcp(runs: list[dict[str, str]], rows_of: RowsOf) -> None:
    options = ["--compression", "none,bf16", "--policy", "sync-replicas", "--runs", "2"]
    rows_of("compression", *options)
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
    arguments: list[str],
    expected: str,
    runs: list[dict[str, str]],
    refusal_of: Callable[..., str],
) -> None:
    assert expected in refusal_of("compression", *arguments)
    assert runs == []
