"""Functions for the processes on the hosts of a benchmark: see bench.rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.hosts import INTERFACE

COUNTERS = Path(f"/sys/class/net/{INTERFACE}/statistics")

GLOO_PORT = 2323  # where rank 0 is met


def run_worker(job: Any, index: int, addresses: list[str]) -> tuple[int, Sequence[Any]]:
    """Run a worker that hosts a part of the parameters; return its exit code and its actors."""
    import uvloop

    from zmqtrain.config.cluster import Role
    from zmqtrain.config.task import TaskConfig
    from zmqtrain.hosting.task import serve
    from zmqtrain.roles.launch import planned

    config = TaskConfig(
        role=Role.WORKER,
        job="bench.rank",
        index=index,
        ps=(),
        worker_addresses=tuple(addresses),
        workers=len(addresses),
        chief=False,
        insecure=True,
        metrics_port=0,
        threads=1,
        log_level="warning",
    )
    actors: list[Any] = []
    return uvloop.run(serve(*planned(config, job), actors=actors)), actors


def sent() -> int:
    """Return the bytes that this host has sent."""
    return int((COUNTERS / "tx_bytes").read_text())


def passed() -> float:
    """Return the bytes that this host has sent or received, of both the mean."""
    return (sent() + int((COUNTERS / "rx_bytes").read_text())) / 2


def join_gloo(index: int, addresses: Sequence[str]) -> None:
    """Begin torch.distributed as one of these ranks, with one thread."""
    import torch
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    meeting = f"tcp://{addresses[0].rpartition(':')[0]}:{GLOO_PORT}"
    distributed.init_process_group("gloo", meeting, rank=index, world_size=len(addresses))
