"""Processes that make steps together, each on a host of its own (see bench.hosts).

`python -m bench.rank KIND ...` starts all of them.

``direct`` is a worker of ours that hosts a part of the parameters, ``to-one`` one of which the
first hosts all, ``gloo`` a rank of torch.distributed that reduces alone. At its end each prints
when its steps began, and what was sent. ``train`` is such a worker of ours that trains a job; the
first one prints the job's summary. ``ours`` and ``theirs``: see bench.local_steps_rank.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import local_steps_rank
from bench.hosts import Hosts
from bench.on_host import join_gloo, run_worker, sent
from bench.processes import json_lines_of
from bench.workload import items_of
from zmqtrain.config.options import flags_of

WARM_UP = 5  # steps not counted
LAYERS = 8  # of a gradient that takes time
TIMEOUT_S = 1200.0
PORT = 2222  # of every rank


def on_hosts(
    hosts: Hosts, kind: str, workers: int, *, timeout_s: float = TIMEOUT_S, **flags: Any
) -> list[dict[str, Any]]:
    """Run processes of this kind, each on a host of its own; return their output."""
    addresses = ",".join(f"{hosts.address(index)}:{PORT}" for index in range(workers))
    namespaces = ",".join(map(hosts.namespace, range(workers)))
    flags |= {"addresses": addresses, "namespaces": namespaces}
    command = [sys.executable, "-m", "bench.rank", kind, *flags_of(flags)]
    return json_lines_of(command, timeout_s=timeout_s)


class Clock:
    """Times at which steps began, and bytes that this host has sent since the first that counts."""

    def __init__(self) -> None:
        self.began_at: list[float] = []
        self._sent: list[int] = []

    def begin(self, step: int = 0) -> None:
        self.began_at.append(time.perf_counter())
        if len(self.began_at) > WARM_UP:
            self._sent = [*self._sent[:1], sent()]

    def tell(self, index: int) -> None:
        nbytes = self._sent[-1] - self._sent[0]
        row = json.dumps({"index": index, "began_at": self.began_at, "sent": nbytes})
        print(f"{row}\n", end="", flush=True)  # one write, or the lines of two ranks get mixed


def step_by_messages(arguments: argparse.Namespace, addresses: list[str]) -> int:
    from bench.jobs import RULES, Blob, dataless_job

    clock = Clock()
    # A variable for each worker: so each of them is whole with one, and left where it lies.
    parts = LAYERS if arguments.compute_ms else len(addresses)
    blob = Blob(arguments.megabytes, "in_place", parts, arguments.compute_ms)
    blob.on_step = clock.begin
    job = dataless_job(
        blob,
        arguments.steps + WARM_UP + 1,
        optimizer=RULES[arguments.rule],
        prefetch=0,
        exchange=arguments.kind,
        copies=arguments.copies,
        overlap=arguments.overlap,
    )
    code, _ = run_worker(job, arguments.index, addresses)
    clock.tell(arguments.index)
    return code


def train(arguments: argparse.Namespace, addresses: list[str]) -> int:
    from zmqtrain.chief.chief import Chief
    from zmqtrain.config.job_file import load_job

    overrides = json.loads(arguments.overrides)
    job = load_job(arguments.job, exchange="direct", **overrides)
    code, actors = run_worker(job, arguments.index, addresses)
    if isinstance(actors[0], Chief) and actors[0].summary is not None:
        print(actors[0].summary.json(), flush=True)
    return code


def gloo(arguments: argparse.Namespace, addresses: list[str]) -> int:
    import torch
    from torch import distributed

    join_gloo(arguments.index, addresses)
    tensor = torch.from_numpy(np.full(items_of(arguments.megabytes), 1e-3, np.float32))
    clock = Clock()
    for _ in range(arguments.steps + WARM_UP):
        clock.begin()
        distributed.all_reduce(tensor)
    clock.begin()
    distributed.barrier()
    distributed.destroy_process_group()
    clock.tell(arguments.index)
    return 0


KINDS: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
    "direct": step_by_messages,
    "to-one": step_by_messages,
    "one-shot": step_by_messages,
    "gloo": gloo,
    "train": train,
    "ours": local_steps_rank.ours,
    "theirs": local_steps_rank.theirs,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--index", type=int, help="of this one; none: start all")
    parser.add_argument("--namespaces", help="the hosts of all", required=True)
    parser.add_argument("--addresses", required=True, help="of all, host:port,host:port")
    parser.add_argument("--megabytes", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rule", default="sgd")
    parser.add_argument("--copies", type=int, default=1, help="of each part")
    parser.add_argument("--compute-ms", type=float, help="of a gradient")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--job", help="that is trained")
    parser.add_argument("--overrides", help="fields of it, as JSON")
    arguments = parser.parse_args()
    addresses = arguments.addresses.split(",")
    if arguments.index is not None:
        return KINDS[arguments.kind](arguments, addresses)
    # A host has a /dev/shm of its own: no other may map what lies there.
    inside = ("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$0" "$@"')
    command = (*inside, sys.executable, "-m", "bench.rank", *sys.argv[1:], "--index")
    ranks = [
        subprocess.Popen(["ip", "netns", "exec", namespace, *command, str(index)])
        for index, namespace in enumerate(arguments.namespaces.split(","))
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
