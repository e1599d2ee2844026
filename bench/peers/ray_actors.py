"""Ray: a ps that is an actor; arrays travel through the object store in shared memory."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np

from bench.peers import shared
from bench.workload import Row

STORED = 16  # arrays of one push+pull's size that the object store has room for
LEAST_STORE_NBYTES = 200_000_000


class Ps:
    """Holds the parameters; its methods are called from afar."""

    def __init__(self, size: int) -> None:
        self._parameters = np.zeros(size, np.float32)
        self._scaled = np.empty_like(self._parameters)

    def push(self, gradient: Any) -> Any:
        """Apply a gradient by SGD; return the parameters."""
        np.multiply(gradient, np.float32(shared.LEARNING_RATE), out=self._scaled)
        self._parameters -= self._scaled
        return self._parameters


def push_pull(arguments: argparse.Namespace) -> list[Row]:
    """Time calls of the actor; the driver is the worker."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    nbytes = int(arguments.megabytes * 1e6)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=max(LEAST_STORE_NBYTES, STORED * nbytes),
        _node_ip_address="127.0.0.1",
    )

    def exchange_for(traffic: shared.Traffic) -> shared.Step:
        ps = ray.remote(Ps).remote(traffic.gradient.size)
        return lambda: ray.get(ps.push.remote(traffic.gradient))

    rows = shared.push_pull_rows("ray", arguments, exchange_for)
    ray.shutdown()
    return rows


if __name__ == "__main__":
    shared.run(push_pull)
