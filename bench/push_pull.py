"""Time of one push+pull: a gradient applied, and the new parameters readable again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import uvloop

from bench import options
from bench.jobs import REFERENCE, USUAL_RULES, VARIABLE, Blob, blob_job, description
from bench.options import json_option, sizes_type, steps_for
from bench.output import report
from bench.peers.shared import free_ports
from bench.workload import MODES, Workload, push_pull_row
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.options import flags_of
from zmqtrain.config.task import TaskConfig
from zmqtrain.hosting.actors import actors_of
from zmqtrain.job import Job
from zmqtrain.planning.plan import plan_for
from zmqtrain.transport.base import Transport
from zmqtrain.transport.by_address import TransportByAddress
from zmqtrain.transport.curve import make_keys
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.transport.security import Security

LANES = (*options.LANES, "memory")
DEVICES = ("cpu", "gpu")
WARM_UP = 3  # steps not counted


@dataclass(frozen=True, slots=True)
class PushPull(Workload):
    """A push+pull of ours.

    ``crash_safe`` says nothing on lane memory, where nothing outlives the process. ``encrypted``:
    every task has a key, and what travels on lane tcp is encrypted. ``device``: where the worker's
    arrays lie, cpu or gpu; ``ps_device``: where the ps's do. ``policy`` and ``exchange``: of the
    job. ``kill``: whether worker 1 is killed in the middle of it, for good.
    """

    rule: str = "sgd"
    crash_safe: bool = True
    encrypted: bool = False
    device: str = "cpu"
    ps_device: str = "cpu"
    policy: str = "hogwild"
    exchange: str = "direct"
    kill: bool = False


def measure(workload: PushPull) -> dict[str, Any]:
    """Return one row of results. Worker 0 and the chief run in this process."""
    per_step = workload.workers if workload.policy == "sync-replicas" else 1
    arguments: dict[str, Any] = {
        "megabytes": workload.megabytes,
        "steps": steps_for(workload.megabytes) * workload.workers // per_step,
    }
    fields = ("rule", "mode", "device", "ps_device", "policy", "exchange")
    arguments |= {name: getattr(workload, name) for name in fields}
    job = blob_job(**arguments)
    killed_at = uvloop.run(_run(workload, job, description(blob_job, **arguments)))
    began_at = _blob_of(job).began_at
    row = push_pull_row(workload, began_at, WARM_UP)
    if killed_at:
        row["kill_to_step_ms"] = 1e3 * (pause_end(began_at, killed_at) - killed_at)
    return {**row, "crash_safe": workload.crash_safe and workload.lane != "memory"}


def pause_end(began_at: Sequence[float], killed_at: float) -> float:
    """Return when the step ended that took longest, as far as it was after a worker's death."""
    return max(pairwise(began_at), key=lambda step: step[1] - max(step[0], killed_at))[1]


async def _run(workload: PushPull, job: Job, described: str) -> float:
    """Return when a worker was killed, in seconds of the performance counter; 0: none was."""
    with _places(workload) as (addresses, keys), contextlib.ExitStack() as stack:
        memory = MemoryTransport()

        def transport(security: Security) -> Transport:
            made = memory if workload.lane == "memory" else TransportByAddress(security)
            stack.callback(made.close)
            return made

        config = TaskConfig(
            role=Role.CHIEF,
            job=REFERENCE,
            ps=addresses,
            workers=workload.workers,
            lane=workload.lane,
            crash_safe=workload.crash_safe,
            keys=keys,
            insecure=keys is None,  # or on loopback no messages would go by TCP
        )
        plan = plan_for(job, config.cluster, lane=workload.lane, crash_safe=workload.crash_safe)
        here = {Task(Role.CHIEF, 0), Task(Role.WORKER, 0)}
        near = [task for task in plan.tasks if task in here or workload.lane == "memory"]
        actors = [
            actor
            for task in near
            for actor in actors_of(config.of(task), plan, transport, lambda status: None)
        ]
        far = [config.of(task) for task in plan.tasks if task not in near]
        processes = [await _start(each, described) for each in far]
        killed_at: list[float] = []
        if workload.kill:

            def kill_in_the_middle(step: int) -> None:
                if step == job.steps // 2:
                    processes[0].kill()
                    killed_at.append(time.perf_counter())

            _blob_of(job).on_step = kill_in_the_middle
        await asyncio.gather(*(actor.run() for actor in actors))
        for process in processes:
            await process.wait()
        return sum(killed_at)


def _blob_of(job: Job) -> Blob:
    assert isinstance(job.model, Blob)
    return job.model


async def _start(config: TaskConfig, described: str) -> asyncio.subprocess.Process:
    named = ("job", "index", "ps", "workers", "lane", "crash_safe")
    flags = {name: getattr(config, name) for name in named} | {
        "metrics_port": 0,
        "log_level": "warning",
    }
    if config.role == Role.WORKER:
        flags["threads"] = 1
    if config.keys is None:
        flags["insecure"] = True
    else:
        flags["keys"] = config.keys
    command = [sys.executable, "-m", f"zmqtrain.roles.{config.role}", *flags_of(flags)]
    return await asyncio.create_subprocess_exec(*command, env={**os.environ, VARIABLE: described})


@contextlib.contextmanager
def _places(workload: PushPull) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Yield an address for each ps, and the directory of keys, if tasks have any.

    Addresses are those of Unix sockets, as a local run has them, except on lane tcp.
    """
    with tempfile.TemporaryDirectory(prefix="zmqtrain-bench-") as directory:
        keys = Path(directory) / "keys"
        if workload.encrypted:
            make_keys(keys, {"ps": workload.ps, "worker": workload.workers, "chief": 1})
        addresses = [f"ipc://{directory}/ps-{number}.sock" for number in range(workload.ps)]
        if workload.lane == "tcp":
            addresses = [f"127.0.0.1:{port}" for port in free_ports(workload.ps)]
        yield tuple(addresses), str(keys) if workload.encrypted else None


@click.command("push-pull")
@click.option(
    "--lane",
    type=click.Choice(LANES),
    default="shm",
    help="between processes by shm or tcp, or memory: all in one process",
)
@click.option(
    "--megabytes",
    "sizes",
    type=sizes_type,
    default="0.0003,0.3,1,13,100",
    help="sizes of the parameters, and of a gradient",
)
@click.option("--workers", type=click.IntRange(1, 64), default=1, help="that push at once")
@click.option("--ps", type=click.IntRange(1, 64), default=1, help="that share the parameters")
@click.option("--rule", type=click.Choice(USUAL_RULES), default="sgd", help="of the update")
@click.option(
    "--crash-safe/--no-crash-safe",
    default=True,
    help="whether a killed ps could go on, which costs a part of an update",
)
@click.option("--device", type=click.Choice(DEVICES), default="cpu", help="of the worker")
@click.option("--ps-device", type=click.Choice(DEVICES), default="cpu", help="of the ps")
@click.option("--keys", "encrypted", is_flag=True, help="encrypt what travels on lane tcp")
@json_option
def push_pull_command(
    lane: str, sizes: tuple[float, ...], encrypted: bool, as_json: bool, **cluster: Any
) -> None:
    """Time one push+pull by size, with every byte touched and in place.

    \b
    Examples:
      python -m bench push-pull
      python -m bench push-pull --lane tcp --megabytes 0.0003,13 --workers 2 --rule adam
      python -m bench push-pull --lane shm --no-crash-safe
      python -m bench push-pull --lane tcp --keys
      python -m bench push-pull --lane shm --device gpu --ps-device gpu
    """
    if encrypted and lane != "tcp":
        raise click.UsageError(f"--keys is for lane tcp; tensors do not travel on lane {lane}")
    workloads = (
        PushPull(lane, mode, megabytes, encrypted=encrypted, **cluster)
        for megabytes in sizes
        for mode in MODES
    )
    report(map(measure, workloads), as_json=as_json)
