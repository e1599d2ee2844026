"""torch.distributed.rpc: a ps that workers call with their gradients, by TensorPipe."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from bench.peers import shared
from bench.workload import TRAINERS, Row, Workload, train_row

POLICIES = ("hogwild",)
TIMEOUT_S = 120.0  # of one call

# Of the ps's process. Calls run in several threads there: the lock keeps Adam's state whole.
_lock = Lock()
_held: dict[str, Any] = {"pushes": 0}


def push_pull(arguments: argparse.Namespace) -> list[Row]:
    """Time calls that send a gradient, apply it by SGD, and return the parameters."""
    with _cluster(arguments, workers=1):
        import torch
        from torch.distributed import rpc

        def exchange_for(traffic: shared.Traffic) -> shared.Step:
            gradient = torch.from_numpy(traffic.gradient)
            return lambda: rpc.rpc_sync("ps", push_sgd, (gradient,)).numpy()

        return shared.push_pull_rows("torch.rpc", arguments, exchange_for)


def train(arguments: argparse.Namespace) -> Row:
    """Train asynchronously: the ps applies every gradient by Adam when it arrives."""
    with _cluster(arguments, TRAINERS) as all_are_ready:
        from torch.distributed import rpc

        step, model = _training(arguments)
        per_second = shared.steps_per_second(
            step, arguments.steps, lambda: int(rpc.rpc_sync("ps", pushes)), all_are_ready
        )
    megabytes = model.gradient.nbytes / 1e6
    workload = Workload("torch.rpc", arguments.policy, megabytes, workers=TRAINERS)
    return train_row(workload, per_second, model.accuracy())


def push_sgd(gradient: Any) -> Any:
    """Carried out by the ps: apply a gradient, return the parameters."""
    import torch

    if "parameters" not in _held:
        _held["parameters"] = torch.zeros_like(gradient)
    return _held["parameters"].sub_(gradient, alpha=shared.LEARNING_RATE)


def push_adam(gradient: Any) -> Any:
    """Carried out by the ps: apply a gradient, return the parameters."""
    model = _held["model"]
    with _lock:
        model.gradient.copy_(gradient)
        model.apply_gradient()
        _held["pushes"] += 1
    return model.parameters.detach()


def pull() -> Any:
    """Carried out by the ps: return the parameters."""
    return _held["model"].parameters.detach()


def pushes() -> int:
    """Carried out by the ps: return how many gradients were applied."""
    return int(_held["pushes"])


@contextmanager
def _cluster(arguments: argparse.Namespace, workers: int) -> Iterator[Callable[[], bool]]:
    """Be worker 0 of a cluster with one ps and ``workers`` workers.

    Yields a function that says whether the other workers have warmed up.
    """
    finished = shared.PROCESSES.Event()
    ready = [shared.PROCESSES.Event() for _ in range(1, workers)]
    with tempfile.TemporaryDirectory() as directory:
        size = workers + 1
        meeting = (f"file://{directory}/tasks", size)
        shared.started(_serve, meeting, arguments)
        for index, event in enumerate(ready, start=1):
            shared.started(_work, meeting, arguments, index, event, finished)
        with _joined(meeting, "worker-0", 0):
            try:
                yield lambda: all(event.is_set() for event in ready)
            finally:
                finished.set()


@contextmanager
def _joined(meeting: tuple[str, int], name: str, rank: int) -> Iterator[None]:
    """Take part in the calls of the cluster; leave when all others leave as well."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)  # there are no more cores than processes
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting[0], rpc_timeout=TIMEOUT_S)
    rpc.init_rpc(name, rank=rank, world_size=meeting[1], rpc_backend_options=options)
    yield
    rpc.shutdown()


def _serve(meeting: tuple[str, int], arguments: argparse.Namespace) -> None:
    if arguments.command == "train":
        import torch

        from bench.peers.torch_mlp import Mlp

        torch.manual_seed(0)
        _held["model"] = Mlp(arguments)
    with _joined(meeting, "ps", meeting[1] - 1):
        pass


def _work(
    meeting: tuple[str, int], arguments: argparse.Namespace, index: int, ready: Any, finished: Any
) -> None:
    with _joined(meeting, f"worker-{index}", index):
        step, _ = _training(arguments)
        shared.train_until(finished.is_set, step, ready)


def _training(arguments: argparse.Namespace) -> tuple[Callable[[], None], Any]:
    """Return a worker's step, and its model."""
    from torch.distributed import rpc

    from bench.peers.torch_mlp import Mlp

    model = Mlp(arguments)
    model.set_parameters(rpc.rpc_sync("ps", pull))

    def step() -> None:
        model.compute_gradient()
        model.set_parameters(rpc.rpc_sync("ps", push_adam, (model.gradient,)))

    return step, model


if __name__ == "__main__":
    from bench.peers import rpc as itself  # calls are sent under the module's own name

    shared.run(itself.push_pull, itself.train, POLICIES)
