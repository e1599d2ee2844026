"""The frameworks of a comparison, and the commands that run them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from bench.options import LANES, steps_for
from bench.peers.environments import OPENMPI, RAY, TENSORFLOW, TORCH, Environment
from bench.train import Training, make_job
from bench.workload import ITEM_NBYTES, Row, Workload, train_row
from zmqtrain.config.options import flags_of

POLICIES = ("hogwild", "sync-replicas")
BENCH, BOARD = (sys.executable, "-m", "bench"), "zmqtrain board"


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

    def command(self, *arguments: str) -> list[str]:
        python = sys.executable if self.environment is None else str(self.environment.python)
        return [python, "-m", f"bench.peers.{self.module}", *arguments]

    def entrant(self, what: str, **options: object) -> Entrant:
        return Entrant(self.name, self.command(what, *flags_of(options)))


@dataclass(frozen=True, slots=True)
class Entrant:
    """One side of a comparison: a command that prints its rows, and how they are read."""

    name: str
    command: Sequence[str]
    row_of: Callable[[Row], Row] = dict


Sides: TypeAlias = tuple[list[Entrant], list[Entrant]]
"""Ours, the first of which is the reference, and the peers'."""

PEERS = (
    Peer("echo", "echo", most_megabytes=1),
    Peer("gloo", "gloo", TORCH, policies=("sync-replicas",)),
    Peer("openmpi", "openmpi", OPENMPI),
    Peer("rpc", "rpc", TORCH, policies=("hogwild",)),
    Peer("ray", "ray_actors", RAY),
    Peer("tensorflow", "tensorflow_ps", TENSORFLOW, policies=POLICIES),
    Peer("mirrored", "tensorflow_mirrored", TENSORFLOW, policies=("sync-replicas",)),
)


def push_pulls(peers: Sequence[Peer], megabytes: float) -> Sides:
    """Return our push-pull over each lane, our step of two workers without ps, and the peers'."""

    def over(lane: str) -> Entrant:
        name = f"zmqtrain {lane}"
        return _ours(name, "push-pull", {"lane": name}, lane=lane, megabytes=megabytes)

    # All-reduce and update, in place.
    like_theirs = {"bench": "push-pull", "lane": BOARD, "mode": "in_place", "ps": 0}
    board = _ours(BOARD, "all-reduce", like_theirs, exchange="board", megabytes=megabytes)
    sizes = {"megabytes": megabytes, "steps": steps_for(megabytes)}
    theirs = [p.entrant("push-pull", **sizes) for p in peers if megabytes <= p.most_megabytes]
    return [*map(over, LANES), board], theirs


def trainings(peers: Sequence[Peer], policy: str, training: Training, examples: Path) -> Sides:
    """Return our trainings by a policy, and the peers', on the ``examples`` in a file for them."""

    def ours(ps: int) -> Entrant:
        own, name = replace(training, ps=ps), "zmqtrain" if ps else BOARD
        flags = flags_of({"policy": policy, **asdict(own)})
        return Entrant(name, [*BENCH, "train", "--json", *flags], partial(_row_of, name, own))

    sizes = {name: getattr(training, name) for name in ("hidden", "batch_size", "steps")}
    theirs = [
        peer.entrant("train", policy=policy, examples=examples, **sizes)
        for peer in peers
        if policy in peer.policies
    ]
    return [ours(1), *([ours(0)] if policy == "sync-replicas" else [])], theirs


def _ours(name: str, benchmark: str, changed: Row, **options: object) -> Entrant:
    command = [*BENCH, benchmark, "--json", *flags_of(options)]
    return Entrant(name, command, lambda row: {**row, **changed})


def _row_of(name: str, training: Training, summary: Row) -> Row:
    """Return the summary of one of our runs as a row like those of the peers."""
    parameters = make_job(**training.arguments).model.parameters(seed=0)
    megabytes = ITEM_NBYTES * sum(values.size for values in parameters.values()) / 1e6
    workers, ps = summary["workers"], summary["ps"]
    workload = Workload(name, summary["policy"], megabytes, workers, ps)
    return train_row(workload, summary["steps_per_second"], summary["accuracy"])
