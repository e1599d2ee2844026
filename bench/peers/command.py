"""`python -m bench peers`: our figures beside those of other systems, taken in the same minutes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.options import json_option, list_of, megabytes_type
from bench.output import report
from bench.peers.compare import compared
from bench.peers.lineup import (
    OUR_LANES,
    PEERS,
    POLICIES,
    Peer,
    Training,
    push_pull_of,
    push_pull_of_ours,
    training_of,
    training_of_ours,
)
from bench.push_pull import LANES
from zmqtrain.data import Mnist
from zmqtrain.errors import ZmqTrainError

WORKLOADS = ("push-pull", "train")
NAMES = [peer.name for peer in PEERS]
COLUMNS = (
    *("bench", "megabytes", "lane", "mode", "workers", "ps", "runs"),
    *("median_ms", "min_ms", "worst_ms", "per_second", "ratio", "accuracy"),
)


@click.command("peers")
@click.option(
    "--what",
    type=list_of(click.Choice(WORKLOADS), "name"),
    default=",".join(WORKLOADS),
    show_default=True,
    help="workloads to compare",
)
@click.option(
    "--only",
    type=list_of(click.Choice(NAMES), "name"),
    help=f"of {', '.join(NAMES)}; default: all",
)
@click.option(
    "--megabytes",
    type=megabytes_type,
    default="0.0003,13,100",
    show_default=True,
    help="sizes of a push+pull",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="directory with MNIST's files, to train on",
)
@click.option("--hidden", type=click.IntRange(1), default=100, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=100, show_default=True)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=3000,
    show_default=True,
    help="global steps of a training run",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--timeout-s",
    type=click.FloatRange(1),
    default=300.0,
    show_default=True,
    help="seconds that one run may take",
)
@click.option("--install", is_flag=True, help="first make the environments that are missing")
@json_option
def peers_command(
    what: tuple[str, ...],
    only: tuple[str, ...] | None,
    megabytes: tuple[float, ...],
    data: Path | None,
    hidden: int,
    batch_size: int,
    steps: int,
    rounds: int,
    timeout_s: float,
    install: bool,
    as_json: bool,
) -> None:
    """Compare with peers: gloo, torch.distributed.rpc, Ray, TensorFlow's parameter servers.

    All sides take turns, round by round. A ratio is how many times as long as ours a side takes;
    ours is the first lane of those that are there. The peers' environments are made in
    ~/.cache/zmqtrain-bench, or where BENCH_ENVIRONMENTS says.

    \b
    Examples:
      python -m bench peers --install --data DIR
      python -m bench peers --what push-pull --only gloo,echo --megabytes 0.0003,13
    """
    peers = installed([peer for peer in PEERS if only is None or peer.name in only], install)

    def rows() -> Iterator[dict[str, Any]]:
        if "push-pull" in what:
            for size in megabytes:
                yield from compare_push_pull(peers, size, rounds, timeout_s)
        if "train" in what:
            if data is None:
                _note("training is left out: --data DIR names the directory with MNIST's files")
            else:
                training = Training(data.absolute(), hidden, batch_size, steps)
                yield from compare_training(peers, training, rounds, timeout_s)

    report(rows(), as_json=as_json, columns=COLUMNS)


def installed(peers: Sequence[Peer], install: bool) -> list[Peer]:
    """Return the peers whose environment is there; say of each other one how to have it."""
    there = []
    for peer in peers:
        environment = peer.environment
        if install and environment is not None and not environment.is_installed:
            _note(f"installing {environment.requirements} in {environment.path} ...")
            environment.install()
        if peer.is_installed:
            there.append(peer)
        else:
            _note(
                f"{peer.name} is left out: not installed; "
                f"python -m bench peers --only {peer.name} --install"
            )
    return there


def compare_push_pull(
    peers: Sequence[Peer], megabytes: float, rounds: int, timeout_s: float
) -> list[dict[str, Any]]:
    """Return the rows of one size; none if no peer moves so much."""
    sides = [push_pull_of(peer, megabytes) for peer in peers if megabytes <= peer.most_megabytes]
    if not sides:
        return []
    for lane in set(OUR_LANES) - set(LANES):
        _note(f"our lane {lane} is left out: this version does not have it")
    ours = [push_pull_of_ours(lane, megabytes) for lane in OUR_LANES if lane in LANES]
    return compared(ours, sides, rounds, timeout_s)


def compare_training(
    peers: Sequence[Peer], training: Training, rounds: int, timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Yield the rows of each policy by which some peer trains."""
    with tempfile.TemporaryDirectory(prefix="zmqtrain-bench-") as directory:
        examples = Path(directory) / "examples.npz"
        for policy in POLICIES:
            trainers = [peer for peer in peers if policy in peer.policies]
            if not trainers:
                continue
            if not examples.exists():
                write_examples(examples, training.data)
            sides = [training_of(peer, policy, training, examples) for peer in trainers]
            yield from compared([training_of_ours(policy, training)], sides, rounds, timeout_s)


def write_examples(path: Path, data: Path) -> None:
    """Write the examples that our own runs learn from to where the peers can read them."""
    try:
        train, test = Mnist().load(str(data))
    except ZmqTrainError as error:
        raise click.ClickException(str(error)) from None
    (x_train, y_train), (x_test, y_test) = train.arrays, test.arrays
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def _note(text: str) -> None:
    click.echo(text, err=True)
