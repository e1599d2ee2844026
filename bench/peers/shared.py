"""Functions of all peers' scripts. Their environments have NumPy, but not zmqtrain."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np

from bench.workload import MODES, Row, Workload, items_of, push_pull_row

WARM_UP = 10  # push+pulls, or each worker's training steps, that are not counted
LEARNING_RATE = 1e-6  # of the SGD that applies a push
CHECK_EVERY = 20  # a worker's steps between two looks at the global step

PROCESSES = multiprocessing.get_context("spawn")

Step = Callable[[], Any]
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
    """The gradient of a workload, and a place to read the parameters into."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.gradient = np.full(items_of(workload.megabytes), 1e-3, np.float32)
        self.touched = workload.mode == "touched"
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

    def row(self, began_at: Sequence[float]) -> Row:
        """Return the row of push+pulls that began at these times; the last is the end."""
        return push_pull_row(self.workload, began_at, WARM_UP)


def traffics(lane: str, arguments: argparse.Namespace, **cluster: int) -> Iterator[Traffic]:
    """Yield what is to be moved, in each mode; ``cluster`` says how many workers and ps."""
    for mode in MODES:
        yield Traffic(Workload(lane, mode, arguments.megabytes, **cluster))


def push_pull_rows(
    lane: str,
    arguments: argparse.Namespace,
    exchange_for: Callable[[Traffic], Step],
    **cluster: int,
) -> list[Row]:
    """Return a row for each mode.

    ``exchange_for`` returns what pushes a traffic's gradient and returns the new parameters.
    """
    return [
        traffic.row(_began_at(traffic, exchange_for(traffic), arguments.steps))
        for traffic in traffics(lane, arguments, **cluster)
    ]


def _began_at(traffic: Traffic, exchange: Step, steps: int) -> list[float]:
    times = []
    for _ in range(WARM_UP + steps):
        times.append(time.perf_counter())
        traffic.write()
        traffic.read(exchange())
    if not traffic.arrived:
        raise SystemExit("no updated parameters came back")
    return [*times, time.perf_counter()]


def steps_per_second(
    step: Step,
    steps: int,
    global_step: Callable[[], int] | None = None,
    all_are_ready: Callable[[], bool] = lambda: True,
) -> float:
    """Train until all workers have warmed up and ``steps`` more global steps are done.

    Returns the rate of those. Without ``global_step`` they are the worker's own.
    """
    for _ in range(WARM_UP):
        step()
    while not all_are_ready():
        step()
    first, started = global_step() if global_step else 0, time.perf_counter()
    own = 0
    while True:
        for _ in range(CHECK_EVERY):
            step()
        own += CHECK_EVERY
        done = global_step() - first if global_step else own
        if done >= steps:
            return done / (time.perf_counter() - started)


def train_until(finished: Callable[[], bool], step: Step, ready: Event) -> None:
    """Train as one of the other workers; ``ready`` is set when this one has warmed up."""
    for _ in range(WARM_UP):
        step()
    ready.set()
    while not finished():
        step()


def started(target: Callable[..., Any], *arguments: Any) -> SpawnProcess:
    """Return a process that carries this out, and ends with this one at the latest."""
    process = PROCESSES.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody listens at."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
