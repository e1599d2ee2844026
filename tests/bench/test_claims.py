"""What benchmarks conclude from what they measured."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import headline
from bench.counting import Counting
from bench.headline_job import job
from bench.memory import ALLOWANCE_NBYTES, Shard, reading_of
from bench.peers.compare import summed_up, turns, with_ratios
from bench.profile import parts_of
from bench.workload import Workload, push_pull_row
from zmqtrain import run
from zmqtrain.store.checkpoint import read_parameters
from zmqtrain.store.manifest import read_manifest

STEPS = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of the headline's job, after so many undisturbed steps."""
    directory = tmp_path_factory.mktemp("headline")
    run(job.with_overrides(steps=STEPS, logdir=str(directory)))
    return directory / f"checkpoints/step-{STEPS:08d}"


def test_headline_finds_that_every_example_was_counted_once(checkpoint: Path) -> None:
    assert [check.kept for check in headline._counted(checkpoint, STEPS)] == [True, True]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({0: 1}, [False, False]),  # counted twice
        ({0: -1}, [False, False]),  # lost
        ({0: 1, 1: -1}, [True, False]),  # one twice, another not at all
    ],
)
def test_headline_finds_a_count_that_is_wrong(
    change: dict[int, int], kept: list[bool], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(checkpoint)
    counts = np.array(read_parameters(checkpoint, manifest)["counts"])
    for example, difference in change.items():
        counts[example, 0] += difference
    monkeypatch.setattr(headline, "read_parameters", lambda *_: {"counts": counts})
    assert [check.kept for check in headline._counted(checkpoint, STEPS)] == kept


@pytest.mark.parametrize(
    ("rule", "workers", "arrays"), [("sgd", 1, 2), ("sgd", 4, 5), ("adam", 1, 4), ("adam", 2, 5)]
)
def test_memory_is_compared_with_parameters_slots_and_a_gradient_for_each_worker(
    rule: str, workers: int, arrays: int
) -> None:
    shard = Shard("shm", rule, megabytes=8.0, workers=workers)
    assert shard.formula_nbytes == arrays * 8_000_000 + ALLOWANCE_NBYTES


def test_memory_is_what_the_kernel_tells_of_a_process() -> None:
    lines = ("VmHWM: 300", "VmRSS: 200", "RssAnon: 70", "RssFile: 90", "RssShmem: 40")
    reading = reading_of("".join(f"{line} kB\n" for line in lines))
    told = (reading.peak, reading.rss, reading.anon, reading.file, reading.shmem)
    assert told == tuple(1024 * kib for kib in (300, 200, 70, 90, 40))


@pytest.mark.parametrize("apply_s", [0.0, 0.001, 0.006, 0.5])
def test_parts_of_a_step_add_up_to_it_and_none_is_negative(apply_s: float) -> None:
    class Measured(Counting):
        def mean(self, tasks: str, name: str, label: str = "") -> float:
            return apply_s if tasks == "ps 0" else 0.006

    parts = parts_of(Measured())
    step_ms = parts.pop("step_ms")
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(step_ms) == pytest.approx(30.0)


def test_push_pulls_are_timed_between_their_begins_without_those_to_warm_up() -> None:
    row = push_pull_row(Workload("tcp", "touched", 13.0), [0.0, 9.0, 10.0, 14.0, 16.0], warm_up=1)
    assert (row["median_ms"], row["min_ms"], row["per_second"]) == (2000.0, 1000.0, 0.5)


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


def row(lane: str, median_ms: float, mode: str = "touched") -> dict[str, Any]:
    workload = {"bench": "push-pull", "megabytes": 1.0, "workers": 1, "ps": 1}
    return {**workload, "lane": lane, "mode": mode, "median_ms": median_ms, "min_ms": median_ms / 2}


def test_ratio_is_of_medians_to_the_reference_in_the_same_mode() -> None:
    runs = [row("gloo", 4.0), row("shm", 2.0), row("gloo", 3.0), row("gloo", 9.0)]
    rows = with_ratios(summed_up([*runs, row("gloo", 5.0, "sync-replicas")]), "shm")
    found = [(r["lane"], r["median_ms"], r["worst_ms"], r["ratio"]) for r in rows]
    assert found == [("gloo", 4.0, 9.0, 2.0), ("shm", 2.0, 2.0, 1.0), ("gloo", 5.0, 5.0, None)]
