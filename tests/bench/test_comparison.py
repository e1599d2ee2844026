"""Turns, medians and ratios of a comparison with peers."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.peers.compare import compared, summed_up, turns, with_ratios
from bench.peers.lineup import Entrant

OURS, PEERS = ["shm", "tcp"], ["gloo", "rpc", "ray"]
TIMEOUT_S = 60.0


def row(lane: str, median_ms: float, mode: str = "touched", **more: Any) -> dict[str, Any]:
    return {
        "bench": "push-pull",
        "lane": lane,
        "mode": mode,
        "megabytes": 1.0,
        "workers": 1,
        "ps": 1,
        "median_ms": median_ms,
        "min_ms": median_ms / 2,
        "per_second": 1e3 / median_ms,
        **more,
    }


@pytest.mark.parametrize(
    ("ours", "peers", "order"),
    [
        (["shm"], ["gloo", "rpc"], "shm gloo shm rpc"),
        (["shm", "tcp"], ["gloo", "rpc"], "shm gloo tcp rpc"),
        (["shm", "tcp"], ["gloo"], "shm gloo tcp"),
        (["shm", "tcp"], ["gloo", "rpc", "ray"], "shm gloo tcp rpc shm ray"),
    ],
)
def test_round_has_one_of_ours_before_each_peer(
    ours: list[str], peers: list[str], order: str
) -> None:
    assert list(turns(ours, peers, 1)) == order.split()


@given(
    ours=st.integers(1, 4).map(lambda n: [f"lane {i}" for i in range(n)]),
    peers=st.integers(1, 6).map(lambda n: [f"peer {i}" for i in range(n)]),
    rounds=st.integers(0, 5),
)
def test_every_peer_runs_once_a_round_between_ours(
    ours: list[str], peers: list[str], rounds: int
) -> None:
    order = list(turns(ours, peers, rounds))
    assert all(order.count(peer) == rounds for peer in peers)
    assert all(order.count(lane) >= rounds for lane in ours)
    assert all(before in ours for before, after in pairwise(order) if after in peers)
    counts = [order.count(lane) for lane in ours]
    assert max(counts) - min(counts) <= 1


def test_runs_of_a_lane_become_their_median_with_the_spread() -> None:
    rows = [row("gloo", 4.0), row("shm", 1.0), row("gloo", 2.0), row("gloo", 9.0)]
    gloo, shm = summed_up(rows)
    assert (gloo["lane"], gloo["runs"], shm["lane"], shm["runs"]) == ("gloo", 3, "shm", 1)
    assert (gloo["median_ms"], gloo["min_ms"], gloo["worst_ms"]) == (4.0, 1.0, 9.0)
    assert gloo["per_second"] == 250.0
    assert "accuracy" not in gloo


def test_modes_of_a_lane_are_kept_apart() -> None:
    rows = [row("gloo", 4.0), row("gloo", 1.0, "in_place")]
    assert [(r["mode"], r["median_ms"]) for r in summed_up(rows)] == [
        ("touched", 4.0),
        ("in_place", 1.0),
    ]


def test_accuracy_of_training_runs_is_their_median() -> None:
    rows = [row("gloo", 1.0, accuracy=accuracy) for accuracy in (0.9, 0.5, 0.8)]
    assert summed_up(rows)[0]["accuracy"] == 0.8


def test_ratio_is_to_the_reference_in_the_same_mode() -> None:
    rows = [
        row("shm", 2.0),
        row("shm", 1.0, "in_place"),
        row("gloo", 3.0),
        row("gloo", 4.0, "in_place"),
        row("gloo", 5.0, "sync-replicas"),
    ]
    ratios = [result["ratio"] for result in with_ratios(rows, "shm")]
    assert ratios == [1.0, 1.0, 1.5, 4.0, None]


def printing(name: str, *rows: dict[str, Any], then: str = "") -> Entrant:
    """A side whose runs print these rows."""
    lines = "".join(f"{json.dumps(line)}\n" for line in rows)
    return Entrant(name, [sys.executable, "-c", f"print({lines!r}, end='')\n{then}"])


def test_sides_are_run_and_compared() -> None:
    ours = [printing("shm", row("shm", 2.0)), printing("tcp", row("tcp", 4.0))]
    peers = [printing("gloo", row("gloo", 3.0)), printing("rpc", row("torch.rpc", 1.0))]
    results = compared(ours, peers, 2, TIMEOUT_S)
    assert [(r["lane"], r["runs"], r["ratio"]) for r in results] == [
        ("shm", 2, 1.0),
        ("gloo", 2, 1.5),
        ("tcp", 2, 2.0),
        ("torch.rpc", 2, 0.5),
    ]


def test_side_that_fails_is_told_of_once_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = printing("gloo", then="raise SystemExit('no torch here')")
    sides = [broken, printing("rpc", row("torch.rpc", 1.0))]
    results = compared([printing("tcp", row("tcp", 2.0))], sides, 3, TIMEOUT_S)
    assert [(r["lane"], r["runs"]) for r in results] == [("tcp", 6), ("torch.rpc", 3)]
    said = capsys.readouterr().err
    assert said.count("gloo ended with exit code 1") == 1
    assert said.count("no torch here") == 1


def test_ratio_is_unknown_when_our_side_fails() -> None:
    ours = [printing("tcp", then="raise SystemExit('broken')")]
    results = compared(ours, [printing("gloo", row("gloo", 1.0))], 1, TIMEOUT_S)
    assert [(r["lane"], r["ratio"]) for r in results] == [("gloo", None)]
