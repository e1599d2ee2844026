"""What is timed, the rows that tell it, and jobs that several processes make alike."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from bench import blob, classifier, weights
from bench.jobs import made_from_variables, variables_of
from bench.output import ROOT
from bench.push_pull import PushPull
from bench.workload import Workload, items_of, push_pull_row, train_row
from zmqtrain import Job


def test_row_of_push_pulls_begins_with_the_workload_and_leaves_the_warm_up_out() -> None:
    row = push_pull_row(Workload("tcp", "touched", 13.0), [0.0, 9.0, 10.0, 14.0, 16.0], warm_up=1)
    assert row == {
        "bench": "push-pull",
        "lane": "tcp",
        "mode": "touched",
        "megabytes": 13.0,
        "workers": 1,
        "ps": 1,
        "median_ms": 2000.0,
        "min_ms": 1000.0,
        "per_second": 0.5,
    }


def test_row_of_ours_tells_more_and_in_the_same_order() -> None:
    theirs, ours = (
        list(push_pull_row(kind("tcp", "touched", 1.0), [0.0, 1.0], warm_up=0))
        for kind in (Workload, PushPull)
    )
    assert [key for key in ours if key in theirs] == theirs
    assert set(ours) - set(theirs) == {"rule", "crash_safe", "encrypted", "device", "ps_device"}


def test_row_of_a_training_run_has_the_mean_step_for_all_of_them() -> None:
    row = train_row(Workload("gloo", "sync-replicas", 0.3, workers=2, ps=0), 500.0, accuracy=0.9)
    assert (row["median_ms"], row["min_ms"], row["per_second"]) == (2.0, 2.0, 500.0)
    told = [row[key] for key in ("bench", "mode", "ps", "accuracy")]
    assert told == ["train", "sync-replicas", 0, 0.9]


@pytest.mark.parametrize(("megabytes", "items"), [(4.0, 1_000_000), (0.0003, 75), (1e-9, 1)])
def test_megabytes_are_so_many_items_and_one_at_the_least(megabytes: float, items: int) -> None:
    assert items_of(megabytes) == items


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (
            blob.make_job,
            {
                "megabytes": 0.0003,
                "steps": 7,
                "rule": "adam",
                "mode": "in_place",
                "device": "cpu",
                "ps_device": "gpu",
            },
        ),
        (weights.make_job, {"megabytes": 1.5, "steps": 3, "rule": "sgd"}),
        (classifier.make_job, {"job": "digits", "hidden": 5, "rule": "sgd"}),
    ],
)
def test_job_is_made_alike_from_arguments_and_from_their_variables(
    make: Callable[..., Job], arguments: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables_of(arguments).items():
        monkeypatch.setenv(name, value)
    here, there = make(**arguments), made_from_variables(make)
    assert repr(here.model) == repr(there.model)
    assert (here.steps, here.optimizer) == (there.steps, there.optimizer)


def test_peers_need_neither_zmqtrain_nor_what_it_needs() -> None:
    code = "import bench.peers.shared, sys; print({'zmqtrain', 'click', 'zmq'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
