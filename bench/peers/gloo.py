"""torch.distributed over gloo: two ranks that reduce among themselves, without a ps.

A push+pull is an all-reduce of the gradient, which is what takes its place in synchronous training:
each rank then applies the sum on its own (that is not counted here).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import Any

from bench.peers import shared
from bench.workload import Row, Workload, train_row

RANKS = 2
POLICIES = ("sync-replicas",)


def push_pull(arguments: argparse.Namespace) -> list[Row]:
    """Time all-reduces of a tensor of the given size; both ranks go in lockstep."""
    rows: list[Row] = _on_all_ranks(_reduce, arguments)
    return rows


def train(arguments: argparse.Namespace) -> Row:
    """Train data-parallel: each step, every rank adds the mean gradient of its own batch."""
    per_second, accuracy, nbytes = _on_all_ranks(_train, arguments)
    workload = Workload("gloo", arguments.policy, nbytes / 1e6, workers=RANKS, ps=0)
    return train_row(workload, per_second, accuracy)


def _on_all_ranks(task: Callable[[int, argparse.Namespace], Any], arguments: Any) -> Any:
    """Return what the task returns on rank 0, which is this process."""
    with tempfile.TemporaryDirectory() as directory:
        meeting = f"file://{directory}/ranks"
        others = [
            shared.started(_joined, task, rank, meeting, arguments) for rank in range(1, RANKS)
        ]
        result = _joined(task, 0, meeting, arguments)
        for other in others:
            other.join()
        return result


def _joined(task: Callable[..., Any], rank: int, meeting: str, arguments: Any) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from torch import distributed

    torch.set_num_threads(1)  # each rank has a core to itself
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    try:
        return task(rank, arguments)
    finally:
        distributed.destroy_process_group()


def _reduce(rank: int, arguments: argparse.Namespace) -> list[Row]:
    import torch
    from torch import distributed

    def exchange_for(traffic: shared.Traffic) -> shared.Step:
        tensor = torch.from_numpy(traffic.gradient)

        def exchange() -> Any:
            distributed.all_reduce(tensor)
            return traffic.gradient

        return exchange

    return shared.push_pull_rows("gloo", arguments, exchange_for, workers=RANKS, ps=0)


def _train(rank: int, arguments: argparse.Namespace) -> tuple[float, float, int]:
    import torch
    from torch import distributed

    from bench.peers.torch_mlp import Mlp

    torch.manual_seed(0)  # the same parameters on every rank
    model = Mlp(arguments)
    torch.manual_seed(rank)

    def step() -> None:
        model.compute_gradient(scale=1 / RANKS)
        distributed.all_reduce(model.gradient)
        model.apply_gradient()

    per_second = shared.steps_per_second(step, arguments.steps)
    return per_second, model.accuracy(), model.gradient.nbytes


if __name__ == "__main__":
    shared.run(push_pull, train, POLICIES)
