"""Who takes part in a comparison, and by which command each runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.classifier import make_job
from bench.options import flags_of, steps_for
from bench.peers.environments import OPENMPI, RAY, TENSORFLOW, TORCH, Environment
from bench.training import Training
from bench.workload import ITEM_NBYTES, Row, Workload, train_row

POLICIES = ("hogwild", "sync-replicas")


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
    Peer("openmpi", "openmpi", OPENMPI),
    Peer("rpc", "rpc", TORCH, policies=("hogwild",)),
    Peer("ray", "ray_actors", RAY),
    Peer("tensorflow", "tensorflow_ps", TENSORFLOW, policies=POLICIES),
    Peer("mirrored", "tensorflow_mirrored", TENSORFLOW, policies=("sync-replicas",)),
)


@dataclass(frozen=True, slots=True)
class Entrant:
    """One side of a comparison: a command that prints its rows, and how they are read."""

    name: str
    command: Sequence[str]
    row_of: Callable[[Row], Row] = dict


def push_pull_of_ours(lane: str, megabytes: float) -> Entrant:
    """Return our push-pull over a lane."""
    flags = flags_of({"lane": lane, "megabytes": megabytes})
    command = [sys.executable, "-m", "bench", "push-pull", "--json", *flags]
    name = f"zmqtrain {lane}"
    return Entrant(name, command, lambda row: {**row, "lane": name})


def all_reduce_of_ours(megabytes: float) -> Entrant:
    """Return our step of two workers without ps: all-reduce and update, in place."""
    flags = flags_of({"exchange": "board", "megabytes": megabytes})
    command = [sys.executable, "-m", "bench", "all-reduce", "--json", *flags]
    return Entrant(
        "zmqtrain board",
        command,
        lambda row: (
            {**row, "bench": "push-pull", "lane": "zmqtrain board", "mode": "in_place"} | {"ps": 0}
        ),
    )


def push_pull_of(peer: Peer, megabytes: float) -> Entrant:
    """Return a peer's push-pull, with as many steps as ours."""
    flags = flags_of({"megabytes": megabytes, "steps": steps_for(megabytes)})
    return Entrant(peer.name, [*peer.command(), "push-pull", *flags])


def training_of_ours(policy: str, training: Training) -> Entrant:
    """Return our training by a policy."""
    flags = flags_of({"policy": policy, **asdict(training)})
    command = [sys.executable, "-m", "bench", "train", "--json", *flags]
    name = "zmqtrain" if training.ps else "zmqtrain board"
    return Entrant(name, command, lambda summary: _row_of(name, summary, training))


def training_of(peer: Peer, policy: str, training: Training, examples: Path) -> Entrant:
    """Return a peer's training by a policy, on the ``examples`` in a file made for it."""
    sizes = {name: getattr(training, name) for name in ("hidden", "batch_size", "steps")}
    flags = flags_of({"policy": policy, "examples": examples, **sizes})
    return Entrant(peer.name, [*peer.command(), "train", *flags])


def _row_of(name: str, summary: Row, training: Training) -> Row:
    """Return the summary of one of our runs as a row like those of the peers."""
    parameters = make_job(**training.arguments).model.parameters(seed=0)
    megabytes = ITEM_NBYTES * sum(values.size for values in parameters.values()) / 1e6
    workers, ps = summary["workers"], summary["ps"]
    workload = Workload(name, summary["policy"], megabytes, workers, ps)
    return train_row(workload, summary["steps_per_second"], summary["accuracy"])
