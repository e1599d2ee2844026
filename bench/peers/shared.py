"""What the peers' scripts share. Their environments have NumPy, but not zmqtrain."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

MODES = ("touched", "in_place")
WARM_UP = 10  # push+pulls, or each worker's training steps, that are not counted
LEARNING_RATE = 1e-6  # of the SGD that applies a push
CLASSES = 10
CHECK_EVERY = 20  # a worker's steps between two looks at the global step

PROCESSES = multiprocessing.get_context("spawn")

Row = dict[str, Any]
PushPull = Callable[[argparse.Namespace], Sequence[Row]]
Train = Callable[[argparse.Namespace], Row]


def run(push_pull: PushPull, train: Train | None = None, policies: Sequence[str] = ()) -> None:
    """Carry out what the command line says, and print one line of JSON for each result."""
    parser = argparse.ArgumentParser(description="Time this peer; print one JSON object a line.")
    commands = parser.add_subparsers(dest="command", required=True)
    bytes_moved = commands.add_parser("push-pull", help="time one push+pull")
    bytes_moved.add_argument("--megabytes", type=float, required=True)
    bytes_moved.add_argument("--steps", type=int, required=True)
    if train is not None:
        training = commands.add_parser("train", help="train a classifier of one hidden layer")
        training.add_argument("--policy", choices=policies, required=True)
        training.add_argument("--examples", required=True, help="npz of x_train, ..., y_test")
        training.add_argument("--hidden", type=int, default=100)
        training.add_argument("--batch-size", type=int, default=100)
        training.add_argument("--steps", type=int, default=3000, help="global steps to time")
    arguments = parser.parse_args()
    if train is not None and arguments.command == "train":
        rows: Sequence[Row] = [train(arguments)]
    else:
        rows = push_pull(arguments)
    for row in rows:
        print(json.dumps(row), flush=True)


class Traffic:
    """A gradient of so many megabytes, and a place to read the parameters into.

    In mode ``touched`` every byte of the gradient is written and every byte of the parameters read,
    as a model would; in mode ``in_place`` they are left where they lie.
    """

    def __init__(self, megabytes: float, mode: str) -> None:
        self.gradient = np.full(max(1, int(megabytes * 1e6 / 4)), 1e-3, np.float32)
        self.touched = mode == "touched"
        self._source = self.gradient.copy()
        self._sink = np.zeros_like(self.gradient)

    def write(self) -> None:
        if self.touched:
            self.gradient[...] = self._source

    def read(self, parameters: Any) -> None:
        if self.touched:
            self._sink[...] = parameters

    @property
    def arrived(self) -> bool:
        """Whether parameters came back that an update has moved from zero."""
        return not self.touched or bool(np.all(self._sink))


def began_at(traffic: Traffic, exchange: Callable[[], Any], steps: int) -> list[float]:
    """Return when each of ``steps`` push+pulls began, in seconds, and when the last had ended.

    ``exchange`` pushes the traffic's gradient and returns the new parameters.
    """
    times = []
    for _ in range(WARM_UP + steps):
        times.append(time.perf_counter())
        traffic.write()
        traffic.read(exchange())
    if not traffic.arrived:
        raise SystemExit("no updated parameters came back")
    return [*times, time.perf_counter()]


def push_pull_row(
    lane: str, mode: str, megabytes: float, times: Sequence[float], *, workers: int = 1, ps: int = 1
) -> Row:
    """Return the row of push+pulls that began at these times."""
    durations = [after - before for before, after in pairwise(times)][WARM_UP:]
    return {
        "bench": "push-pull",
        "lane": lane,
        "mode": mode,
        "megabytes": megabytes,
        "workers": workers,
        "ps": ps,
        "median_ms": 1e3 * statistics.median(durations),
        "min_ms": 1e3 * min(durations),
        "per_second": 1 / statistics.median(durations),
    }


def steps_per_second(
    step: Callable[[], Any],
    global_step: Callable[[], int],
    steps: int,
    all_are_ready: Callable[[], bool] = lambda: True,
) -> float:
    """Train until all workers have warmed up and ``steps`` more global steps are done.

    Returns the rate of those.
    """
    for _ in range(WARM_UP):
        step()
    while not all_are_ready():
        step()
    first, started = global_step(), time.perf_counter()
    while True:
        for _ in range(CHECK_EVERY):
            step()
        done = global_step() - first
        if done >= steps:
            return done / (time.perf_counter() - started)


def train_row(
    lane: str,
    arguments: argparse.Namespace,
    per_second: float,
    accuracy: float,
    nbytes: int,
    *,
    workers: int,
    ps: int,
) -> Row:
    """Return the row of a training run whose parameters have so many bytes."""
    return {
        "bench": "train",
        "lane": lane,
        "mode": arguments.policy,
        "megabytes": nbytes / 1e6,
        "workers": workers,
        "ps": ps,
        "median_ms": 1e3 / per_second,
        "min_ms": 1e3 / per_second,
        "per_second": per_second,
        "accuracy": accuracy,
    }


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody listens at."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
