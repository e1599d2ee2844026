"""What benchmarks conclude from what they measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import headline
from bench.counting import Counting
from bench.headline_job import job
from bench.peers.compare import summed_up, with_ratios
from bench.profile import parts_of
from bench.push_pull import pause_end
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


@pytest.mark.parametrize("apply_s", [0.0, 0.001, 0.006, 0.5])
def test_parts_of_a_step_add_up_to_it_and_none_is_negative(apply_s: float) -> None:
    class Measured(Counting):
        def mean(self, tasks: str, name: str, label: str = "") -> float:
            return apply_s if tasks == "ps 0" else 0.006

    parts = parts_of(Measured())
    step_ms = parts.pop("step_ms")
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(step_ms) == pytest.approx(30.0)


@pytest.mark.parametrize(("killed_at", "end"), [(2.5, 8.0), (3.1, 8.0), (6.9, 8.0), (7.9, 9.0)])
def test_step_that_a_death_ends_late_is_the_longest_after_it(killed_at: float, end: float) -> None:
    assert pause_end([0.0, 1.0, 2.0, 3.0, 8.0, 9.0], killed_at) == end


def row(lane: str, median_ms: float, mode: str = "touched") -> dict[str, Any]:
    workload = {"bench": "push-pull", "megabytes": 1.0, "workers": 1, "ps": 1}
    return {**workload, "lane": lane, "mode": mode, "median_ms": median_ms, "min_ms": median_ms / 2}


def test_ratio_is_of_medians_to_the_reference_in_the_same_mode() -> None:
    runs = [row("gloo", 4.0), row("shm", 2.0), row("gloo", 3.0), row("gloo", 9.0)]
    rows = with_ratios(summed_up([*runs, row("gloo", 5.0, "sync-replicas")]), "shm")
    found = [(r["lane"], r["median_ms"], r["worst_ms"], r["ratio"]) for r in rows]
    assert found == [("gloo", 4.0, 9.0, 2.0), ("shm", 2.0, 2.0, 1.0), ("gloo", 5.0, 5.0, None)]
