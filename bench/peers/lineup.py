"""Who takes part in a comparison, and by which command each runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.options import steps_for
from bench.peers.environments import RAY, TENSORFLOW, TORCH, Environment

Row = Mapping[str, Any]

OUR_LANES = ("shm", "tcp")  # the first that there is, is what the others are compared with
FEATURES, CLASSES = 784, 10
OUR_WORKERS = 2  # that train, as the peers' scripts have it
POLICIES = ("hogwild", "sync-replicas")


@dataclass(frozen=True, slots=True)
class Training:
    """The training workload: 784-hidden-10 by Adam, 1 ps and 2 workers."""

    data: Path
    hidden: int
    batch_size: int
    steps: int


@dataclass(frozen=True, slots=True)
class Peer:
    """A system that we are compared with: ``module`` of this package is its script."""

    name: str
    module: str
    environment: Environment | None = None  # None: it runs in ours
    policies: Sequence[str] = ()  # by which it can train
    most_megabytes: float = math.inf  # that it moves in a push+pull

    @property
    def is_installed(self) -> bool:
        return self.environment is None or self.environment.is_installed

    def command(self) -> list[str]:
        python = sys.executable if self.environment is None else str(self.environment.python)
        return [python, "-m", f"bench.peers.{self.module}"]


PEERS = (
    Peer("echo", "echo", most_megabytes=1),
    Peer("gloo", "gloo", TORCH, policies=("sync-replicas",)),
    Peer("rpc", "rpc", TORCH, policies=("hogwild",)),
    Peer("ray", "ray_actors", RAY),
    Peer("tensorflow", "tensorflow_ps", TENSORFLOW, policies=POLICIES),
)


@dataclass(frozen=True, slots=True)
class Entrant:
    """One side of a comparison: a command that prints its rows, and how they are read."""

    name: str
    command: Sequence[str]
    row_of: Callable[[Row], Row] = dict


def push_pull_of_ours(lane: str, megabytes: float) -> Entrant:
    """Return our push-pull over a lane."""
    options = ["--lane", lane, "--megabytes", str(megabytes), "--json"]
    command = [sys.executable, "-m", "bench", "push-pull", *options]
    name = f"zmqtrain {lane}"
    return Entrant(name, command, lambda row: {**row, "lane": name})


def push_pull_of(peer: Peer, megabytes: float) -> Entrant:
    """Return a peer's push-pull, with as many steps as ours."""
    options = ["--megabytes", str(megabytes), "--steps", str(steps_for(megabytes))]
    return Entrant(peer.name, [*peer.command(), "push-pull", *options])


def training_of_ours(policy: str, training: Training) -> Entrant:
    """Return our training by a policy."""
    parameters = (FEATURES + 1) * training.hidden + (training.hidden + 1) * CLASSES
    megabytes = 4e-6 * parameters
    options = {
        "--policy": policy,
        "--data": training.data,
        "--workers": OUR_WORKERS,
        **_sizes(training),
    }
    command = [sys.executable, "-m", "bench", "train", "--json", *_flags(options)]
    return Entrant("zmqtrain", command, lambda row: {**_training_row(row), "megabytes": megabytes})


def training_of(peer: Peer, policy: str, training: Training, examples: Path) -> Entrant:
    """Return a peer's training by a policy, on the ``examples`` in a file made for it."""
    options = {"--policy": policy, "--examples": examples, **_sizes(training)}
    return Entrant(peer.name, [*peer.command(), "train", *_flags(options)])


def _sizes(training: Training) -> dict[str, object]:
    return {
        "--hidden": training.hidden,
        "--batch-size": training.batch_size,
        "--steps": training.steps,
    }


def _flags(options: Mapping[str, object]) -> list[str]:
    return [part for flag, value in options.items() for part in (flag, str(value))]


def _training_row(row: Row) -> Row:
    """Return the summary of one of our runs with the keys that the peers' rows have."""
    ms = 1e3 / row["steps_per_second"]
    return {
        "bench": "train",
        "lane": "zmqtrain",
        "mode": row["policy"],
        "workers": row["workers"],
        "ps": row["ps"],
        "median_ms": ms,
        "min_ms": ms,
        "per_second": row["steps_per_second"],
        "accuracy": row["accuracy"],
    }
