"""The peers' command, their scripts, and the environments that these need."""

from __future__ import annotations

import py_compile
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import Result

from bench.output import ROOT
from bench.peers import environments
from bench.peers.command import write_examples
from bench.peers.environments import TORCH, Environment
from bench.peers.lineup import PEERS, training_of, training_of_ours
from bench.processes import json_lines_of
from bench.training import Training
from bench.workload import MODES

SCRIPTS = sorted((ROOT / "bench" / "peers").glob("*.py"))
TIMEOUT_S = 60.0
TRAINING = Training(
    job="mnist",
    hidden=7,
    batch_size=5,
    rule="adam",
    ps=1,
    workers=2,
    steps=3,
    data=Path("/data"),
)


@pytest.fixture
def no_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(environments.DIRECTORY, str(tmp_path / "environments"))
    return tmp_path / "environments"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that installing runs; each succeeds, unless it says "bad"."""
    run: list[list[str]] = []

    def fake(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        run.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        return subprocess.CompletedProcess(command, 1 if "bad" in command else 0)

    monkeypatch.setattr(subprocess, "run", fake)
    return run


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_compiles(path: Path, tmp_path: Path) -> None:
    py_compile.compile(str(path), cfile=str(tmp_path / "compiled"), doraise=True)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_script_says_how_it_is_used_without_the_peer_being_installed(peer: Any) -> None:
    command = [sys.executable, *peer.command()[1:]]
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:") and "push-pull" in done.stdout
    assert ("train" in done.stdout) == bool(peer.policies)


def test_echo_prints_a_row_for_each_mode_with_the_keys_of_ours() -> None:
    command = [sys.executable, "-m", "bench.peers.echo", "push-pull"]
    rows = json_lines_of([*command, "--megabytes", "0.0003", "--steps", "5"], timeout_s=TIMEOUT_S)
    assert [row["mode"] for row in rows] == list(MODES)
    assert set(rows[0]) == {
        *("bench", "lane", "mode", "megabytes", "workers", "ps"),
        *("median_ms", "min_ms", "per_second"),
    }
    assert 0 < rows[0]["min_ms"] <= rows[0]["median_ms"]


@pytest.mark.parametrize("name", [peer.name for peer in PEERS if peer.environment])
def test_peer_that_is_not_installed_is_left_out_with_a_hint(
    name: str, no_environments: Path, invoke: Callable[..., Result]
) -> None:
    result = invoke("peers", "--only", name, "--what", "push-pull")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        f"{name} is left out: not installed; python -m bench peers --only {name} --install"
    ]
    assert result.stdout == ""


def test_training_without_data_is_left_out_with_a_hint(
    no_environments: Path, invoke: Callable[..., Result]
) -> None:
    result = invoke("peers", "--only", "echo", "--what", "train")
    assert result.exit_code == 0
    assert "training is left out: --data DIR" in result.stderr


@pytest.mark.parametrize("arguments", [["--only", "mpi"], ["--what", "pull"], ["--rounds", "0"]])
def test_wrong_option_is_refused(arguments: list[str], refusal_of: Callable[..., str]) -> None:
    assert arguments[1] in refusal_of("peers", *arguments)


def test_directory_without_mnist_is_refused_with_the_names_of_its_files(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="train-images-idx3-ubyte"):
        write_examples(tmp_path / "examples.npz", tmp_path)


def test_both_sides_train_the_same_network_on_the_same_data() -> None:
    ours = training_of_ours("hogwild", TRAINING).command
    theirs = training_of(PEERS[-1], "hogwild", TRAINING, Path("/examples.npz")).command
    for flag, value in (("--hidden", "7"), ("--batch-size", "5"), ("--steps", "3")):
        assert ours[ours.index(flag) + 1] == theirs[theirs.index(flag) + 1] == value


def test_summary_of_our_run_becomes_a_row_like_a_peers() -> None:
    ours = training_of_ours("hogwild", TRAINING)
    summary = {"policy": "hogwild", "workers": 2, "ps": 1, "steps_per_second": 500.0}
    row = ours.row_of({**summary, "accuracy": 0.9, "loss": 0.1})
    assert (row["lane"], row["mode"], row["median_ms"]) == ("zmqtrain", "hogwild", 2.0)
    assert row["megabytes"] == pytest.approx(4 * (784 * 7 + 7 + 7 * 10 + 10) / 1e6)


def test_environment_counts_only_when_it_is_whole(
    no_environments: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TORCH.path == no_environments / "torch"
    monkeypatch.setenv("BENCH_TORCH", "bad")
    with pytest.raises(click.ClickException, match="BENCH_TORCH"):
        TORCH.install()
    assert not TORCH.is_installed
    monkeypatch.setenv("BENCH_TORCH", "torch --index-url 'file:///a b'")
    no_environments.joinpath("torch").rmdir()
    TORCH.install()
    assert TORCH.is_installed
    assert commands[-1][-3:] == ["torch", "--index-url", "file:///a b"]
    assert commands[-1][0] == str(TORCH.python)


def test_environment_for_an_older_python_says_which_it_needs(
    no_environments: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    old = Environment("old", "old==1", newest_python=(3, 9))
    with pytest.raises(click.ClickException, match=r"python3\.9"):
        old.install()
    assert commands == []


def test_install_makes_what_is_missing_and_nothing_else(
    no_environments: Path, commands: list[list[str]], invoke: Callable[..., Result]
) -> None:
    for _ in range(2):
        result = invoke("peers", "--only", "gloo,rpc", "--what", "train", "--install")
        assert result.exit_code == 0
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]


def test_examples_for_the_peers_are_those_that_we_learn_from(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {
        "x_train": random.integers(0, 256, (4, 28, 28), np.uint8),
        "y_train": np.arange(4, dtype=np.uint8),
        "x_test": random.integers(0, 256, (2, 28, 28), np.uint8),
        "y_test": np.arange(2, dtype=np.uint8),
    }
    np.savez(tmp_path / "mnist.npz", **arrays)
    write_examples(tmp_path / "examples.npz", tmp_path)
    with np.load(tmp_path / "examples.npz") as written:
        assert set(written) == set(arrays)
        pixels = np.rint(255 * written["x_train"]).astype(np.uint8)
        np.testing.assert_array_equal(pixels, arrays["x_train"].reshape(4, 784))
        np.testing.assert_array_equal(written["y_test"], arrays["y_test"])
