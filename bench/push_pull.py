"""How long one push+pull takes: a gradient applied, and the new parameters readable again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from bench.blob import Blob, make_job
from zmqtrain.cluster import Role
from zmqtrain.config import TaskConfig
from zmqtrain.job import Job
from zmqtrain.roles.chief import Chief
from zmqtrain.roles.ps import ParameterServer
from zmqtrain.roles.worker import Worker
from zmqtrain.transport.base import Transport
from zmqtrain.transport.curve import make_pair
from zmqtrain.transport.keys import Owner, add_keys
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.transport.router_dealer import ZmqTransport

LANES = ("shm", "tcp", "memory")
WARM_UP = 3  # steps not counted


def measure(
    lane: str,
    megabytes: float,
    *,
    workers: int,
    ps: int,
    rule: str,
    mode: str,
    steps: int,
    crash_safe: bool = True,
    encrypted: bool = False,
) -> dict[str, Any]:
    """Return one row of results. Worker 0 and the chief run in this process.

    ``encrypted``: every task has a key, and what travels on lane tcp is encrypted.
    """
    settings = {
        "BENCH_MEGABYTES": str(megabytes),
        "BENCH_STEPS": str(steps * workers),
        "BENCH_RULE": rule,
        "BENCH_MODE": mode,
    }
    job = make_job(megabytes, steps * workers, rule, mode)
    with _keys(workers, ps) if encrypted else contextlib.nullcontext() as keys:
        uvloop.run(_run(lane, job, workers, ps, settings, crash_safe=crash_safe, keys=keys))
    model = job.model
    assert isinstance(model, Blob)
    times = [b - a for a, b in zip(model.began_at, model.began_at[1:], strict=False)][WARM_UP:]
    return {
        "bench": "push-pull",
        "lane": lane,
        "mode": mode,
        "megabytes": megabytes,
        "workers": workers,
        "ps": ps,
        "rule": rule,
        "crash_safe": crash_safe and lane != "memory",
        "encrypted": encrypted,
        "median_ms": 1e3 * statistics.median(times),
        "min_ms": 1e3 * min(times),
        "per_second": 1 / statistics.median(times),
    }


async def _run(
    lane: str,
    job: Job,
    workers: int,
    ps: int,
    settings: dict[str, str],
    *,
    crash_safe: bool,
    keys: str | None,
) -> None:
    with _addresses(lane, ps) as addresses, contextlib.ExitStack() as stack:
        memory = MemoryTransport()

        def transport(config: TaskConfig) -> Transport:
            made = memory if lane == "memory" else ZmqTransport(config.security)
            stack.callback(made.close)
            return made

        def config(role: Role, index: int = 0) -> TaskConfig:
            return TaskConfig(
                role=role,
                job="bench.blob_job",
                index=index,
                ps=addresses,
                workers=workers,
                lane=lane,
                crash_safe=crash_safe,
                keys=keys,
            )

        chief, worker = config(Role.CHIEF), config(Role.WORKER)
        actors: list[Any] = [
            Chief(chief, job, transport(chief), lambda status: None),
            Worker(worker, job, transport(worker)),
        ]
        others = [(Role.WORKER, index) for index in range(1, workers)]
        if lane == "memory":
            actors += [ParameterServer(config(Role.PS, index), job, memory) for index in range(ps)]
            actors += [Worker(config(*other), job, memory) for other in others]
            processes = []
        else:
            others += [(Role.PS, index) for index in range(ps)]
            processes = [await _start(config(*other), settings) for other in others]
        await asyncio.gather(*(actor.run() for actor in actors))
        for process in processes:
            await process.wait()


async def _start(config: TaskConfig, settings: dict[str, str]) -> asyncio.subprocess.Process:
    command = [
        *(sys.executable, "-m", f"zmqtrain.roles.{config.role}", "--job", config.job),
        *("--index", str(config.index), "--ps", ",".join(config.ps), "--metrics-port", "0"),
        *("--workers", str(config.workers), "--threads", "1", "--log-level", "warning"),
        *("--lane", config.lane, "--crash-safe" if config.crash_safe else "--no-crash-safe"),
    ]
    if config.keys is not None:
        command += ["--keys", config.keys]
    return await asyncio.create_subprocess_exec(*command, env={**os.environ, **settings})


@contextlib.contextmanager
def _keys(workers: int, ps: int) -> Iterator[str]:
    """Yield a directory with a key for every task."""
    counts = {"ps": ps, "worker": workers, "chief": 1}
    owners = [Owner(role, index) for role, count in counts.items() for index in range(count)]
    with tempfile.TemporaryDirectory(prefix="zmqtrain-bench-") as directory:
        add_keys(Path(directory), {owner: make_pair() for owner in owners})
        yield directory


@contextlib.contextmanager
def _addresses(lane: str, ps: int) -> Iterator[tuple[str, ...]]:
    """Yield an address for each ps: Unix sockets, as a local run has them, except on lane tcp."""
    if lane == "tcp":
        yield tuple(f"127.0.0.1:{24600 + index}" for index in range(ps))
        return
    directory = Path(tempfile.mkdtemp(prefix="zmqtrain-bench-"))
    try:
        yield tuple(f"ipc://{directory}/ps-{index}.sock" for index in range(ps))
    finally:
        shutil.rmtree(directory)
