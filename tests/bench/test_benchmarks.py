"""Every benchmark runs, ends with 0, and prints rows with the keys that README's tables have."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from bench import options as bench_options
from bench.__main__ import COMMANDS, main
from bench.dashboard import dashboard_command
from bench.headline import headline_command
from bench.local_steps import Side, local_steps_command, reached
from bench.output import ROOT
from bench.peers.command import peers_command
from bench.peers.lineup import PEERS, Peer
from bench.peers.table_work import Work
from bench.processes import json_lines_of
from bench.profile import COLUMNS as PROFILE
from bench.tables import measure
from bench.workload import MODES
from tests.constants import Constants

TIMES = {"bench", "median_ms", "min_ms", "per_second"}
SMALL = "--hidden 0 --steps 40 --workers 1"

RUNS: dict[str, tuple[str, set[str]]] = {
    "push-pull": ("--lane tcp --keys --megabytes 0.01", TIMES | {"lane", "encrypted"}),
    "all-reduce": (
        "--exchange board,kernel --megabytes 0.01",
        TIMES | {"exchange", "megabytes", "workers", "update"},
    ),
    "kernels": ("--rule sgd --megabytes 0.01", {"bench", "rule", "megabytes"}),
    "train": (f"--job digits {SMALL}", {"steps_per_second", "accuracy", "loss"}),
    "memory": (
        "--exchange board --lane shm --rule sgd --megabytes 1 --workers 1 --steps 10",
        {"rss_mb", "formula_mb", "over_mb", "pushes"},
    ),
    "profile": (f"--policy hogwild --lane tcp --compression int8 {SMALL}", set(PROFILE)),
    "mirrored": (
        "--model mlp --side devices --steps 10",
        {"model", "side", "workers", "devices", "steps_per_second", "examples_per_second"},
    ),
    "models": (
        "--model cnn --batches 10",
        {"framework", "model", "side", "workers", "policy", "examples_per_second"}
        | {"steps_per_second", "loss", "accuracy", "rss_mb"},
    ),
    "gpu": ("--device cpu --parts copies", {"bench", "part"}),
    "tables": (
        # torch has no sync-replicas: its loop is run below
        "--ps 0 --tables 2 --rows 100 --batch-size 8 --batches 10 --policy sync-replicas",
        {"side", "rule", "tables", "rows", "dim", "batch_size", "workers", "examples_per_second"}
        | {"rows_per_second", "rss_mb", "first_batch_s", "nbytes_per_step", "cpu_ms_per_batch"},
    ),
    "simulate": ("--workers 10 --ps 2 --policy hogwild --gradients 20", {"bench", "workers"}),
}


def test_every_benchmark_is_run_here_or_takes_too_long() -> None:
    slow = {headline_command.name, peers_command.name, dashboard_command.name}
    slow.add(local_steps_command.name)  # on hosts that only root can make
    assert {command.name for command in COMMANDS} == {*RUNS, *slow}


@pytest.mark.integration
@pytest.mark.parametrize("name", RUNS)
def test_benchmark_prints_its_rows(name: str, constants: Constants) -> None:
    constants(bench_options, STEPS={})  # the fewest of them
    if name in ("models", "tables"):
        pytest.importorskip("torch")
    options, keys = RUNS[name]
    done = CliRunner().invoke(main, [name, *options.split(), "--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows
    for row in rows:
        assert row["bench"] == name
        assert keys <= row.keys()


@pytest.mark.integration
def test_loop_of_torch_prints_the_row_of_our_side_of_tables() -> None:
    pytest.importorskip("torch")
    size = {"tables": 2, "rows": 100, "dim": 4, "batch_size": 8, "hidden": 0, "batches": 10}
    one = {"ps": 0, "workers": 1, "threads": 1}
    row = measure(Work(rule="sgd", policy="hogwild", **size, **one), "shm", "torch")
    assert RUNS["tables"][1] | {"bench"} <= row.keys()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--exchange ring", "use direct"),
        ("--exchange board,direct", "expected one kind"),
        ("--exchange direct --kill", "--kill is of board and ps"),
    ],
)
def test_exchanges_that_cannot_be_measured_are_refused(options: str, told: str) -> None:
    done = CliRunner().invoke(main, ["all-reduce", *options.split()])
    assert done.exit_code == 2
    assert told in done.output


def test_nccl_is_not_measured_without_gpus() -> None:
    done = CliRunner().invoke(main, ["mirrored", "--side", "devices", "--exchange", "nccl"])
    assert done.exit_code == 2
    assert "--side is devices; expected gpus" in done.output


def test_rows_of_a_table_are_whole_numbers() -> None:
    done = CliRunner().invoke(main, ["tables", "--rows", "1e5,10.5"])
    assert done.exit_code == 2
    assert "10.5 is not a whole number of rows" in done.output


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_script_of_a_peer_says_how_it_is_used_without_the_peer_being_installed(peer: Peer) -> None:
    command = [sys.executable, *peer.command()[1:], "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ("train" in done.stdout) == bool(peer.policies)


def test_echo_prints_rows_like_ours() -> None:
    command = [sys.executable, "-m", "bench.peers.echo", "push-pull", "--megabytes", "0.001"]
    rows = json_lines_of([*command, "--steps", "5"], timeout_s=60)
    assert {row["mode"] for row in rows} == set(MODES)
    assert all(row.keys() >= TIMES | {"lane", "megabytes"} for row in rows)


def test_peers_need_neither_zmqtrain_nor_what_it_needs() -> None:
    code = "import bench.peers.shared, sys; print({'zmqtrain', 'click', 'zmq'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("target", "expected"),
    [(4.0, 1.0), (2.5, 2.5), (2.0, 3.0), (1.0, None)],
    ids=["at once", "between two points", "at a point", "never"],
)
def test_time_to_a_loss_lies_where_the_curve_first_comes_to_it(
    target: float, expected: float | None
) -> None:
    assert reached(target, [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 2.1]) == expected


@pytest.mark.parametrize(("batches", "h"), [(100, 0), (100, 10), (60, 50), (400, 200), (30, 7)])
def test_curve_of_local_steps_has_points_after_whole_rounds(batches: int, h: int) -> None:
    task = Side("local-steps", h).task("small", batches, after=0, seed=1)
    assert task.every % max(1, h) == task.batches % task.every == 0
    assert task.batches >= batches * (1.5 if h else 1)
