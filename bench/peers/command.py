"""`python -m bench peers`: our figures beside those of other systems, taken in the same minutes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import numpy as np

from bench.options import batch_size_option, data_option, json_option, list_of, sizes_type
from bench.output import report
from bench.peers.compare import compared
from bench.peers.lineup import PEERS, POLICIES, Peer, Sides, push_pulls, trainings
from bench.train import Training
from bench.workload import TRAINERS, Row
from zmqtrain.config.commands import FiniteRange
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
    help="workloads to compare",
)
@click.option(
    "--only", type=list_of(click.Choice(NAMES), "name"), help=f"of {', '.join(NAMES)}; default: all"
)
@click.option("--megabytes", type=sizes_type, default="0.0003,13,100", help="sizes of a push+pull")
@data_option
@click.option("--hidden", type=click.IntRange(1), default=100)
@batch_size_option
@click.option(
    "--steps", type=click.IntRange(1), default=3000, help="global steps of a training run"
)
@click.option("--rounds", type=click.IntRange(1), default=3)
@click.option(
    "--timeout-s", type=FiniteRange(1), default=300.0, help="seconds that one run may take"
)
@click.option("--install", is_flag=True, help="first make the environments that are missing")
@json_option
def peers_command(
    what: tuple[str, ...],
    only: tuple[str, ...] | None,
    megabytes: tuple[float, ...],
    data: Path | None,
    rounds: int,
    timeout_s: float,
    install: bool,
    as_json: bool,
    **sizes: int,
) -> None:
    """Compare with gloo, Open MPI, torch.distributed.rpc, Ray, and TensorFlow: its parameter
    servers, and its MultiWorkerMirroredStrategy (mirrored).

    All sides take turns, round by round. A ratio is how many times as long as ours a side takes;
    of our lanes that is shm. Beside the all-reduces of gloo, openmpi and mirrored stands our board.
    The peers' environments are made in ~/.cache/zmqtrain-bench, or where BENCH_ENVIRONMENTS says.

    \b
    Examples:
      python -m bench peers --install --data DIR
      python -m bench peers --what push-pull --only gloo,echo --megabytes 0.0003,13
    """
    peers = installed([peer for peer in PEERS if only is None or peer.name in only], install)
    if "train" in what and data is None:
        _note("training is left out: --data DIR names the directory with MNIST's files")

    def rows() -> Iterator[Row]:
        for size in megabytes if "push-pull" in what else ():
            ours, theirs = push_pulls(peers, size)
            if theirs:  # else no peer moves so much
                yield from compared(ours, theirs, rounds, timeout_s)
        if "train" in what and data is not None:
            for ours, theirs in _trainings(peers, data.absolute(), **sizes):
                yield from compared(ours, theirs, rounds, timeout_s)

    report(rows(), as_json=as_json, columns=COLUMNS)


def _trainings(peers: Sequence[Peer], data: Path, **sizes: int) -> Iterator[Sides]:
    """Yield the sides of each policy by which some peer trains."""
    training = Training(job="mnist", rule="adam", ps=1, workers=TRAINERS, data=data, **sizes)
    with tempfile.TemporaryDirectory(prefix="zmqtrain-bench-") as directory:
        examples = Path(directory) / "examples.npz"
        for policy in POLICIES:
            ours, theirs = trainings(peers, policy, training, examples)
            if theirs:
                if not examples.exists():
                    write_examples(examples, data)
                yield ours, theirs


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
