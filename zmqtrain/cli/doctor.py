"""`zmqtrain doctor`: whether this machine can train."""

from __future__ import annotations

import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import psutil
from rich.text import Text

from zmqtrain.cli.output import show, table
from zmqtrain.compute.threads import usable_cores
from zmqtrain.config.commands import command
from zmqtrain.config.task import METRICS_PORTS, TaskConfig
from zmqtrain.errors import ConfigError, ExitCode, ZmqTrainError
from zmqtrain.store.segment_files import default_directory
from zmqtrain.transport.own_directory import for_small_files
from zmqtrain.units import counted, data_size

FRAMEWORKS = ("torch", "jax", "keras", "cupy-cuda12x", "cupy-cuda13x")
FEWEST_FILES = 256
LEAST_ROOM = 64 << 20
STEPS = 20


@command("doctor")
def doctor_command() -> int:
    """Check that this machine can train, before the first run.

    The last check trains a small job on two workers. The exit code is 2 if a check fails, and
    its line says what to do. For the job itself there is zmqtrain check.

    \b
    Examples:
      zmqtrain doctor
      zmqtrain doctor && zmqtrain run net.py
    """
    failed, rows = False, []
    for name, examine in CHECKS.items():
        try:
            rows.append((name, examine(), Text("ok", "green")))
        except (ZmqTrainError, OSError) as error:
            rows.append((name, str(error), Text("failed", "red")))
            failed = True
    show(table("check", "found", "", rows=rows, folded=("found",)))
    return ExitCode.USAGE if failed else ExitCode.OK


def _machine() -> str:
    memory = psutil.virtual_memory()
    free = data_size(memory.available)
    return f"{platform.system()}, {counted(usable_cores(), 'core')}, {free} of memory free"


def _packages() -> str:
    names = ("zmqtrain", "numpy", "pyzmq", "llvmlite")
    python = ".".join(map(str, sys.version_info[:3]))
    return ", ".join([f"Python {python}", *(f"{name} {version(name)}" for name in names)])


def _frameworks() -> str:
    found = []
    for name in FRAMEWORKS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found) or "none: models of NumPy only; pip install 'zmqtrain[torch]' adds one"


def _shared_memory() -> str:
    directory = default_directory()
    if directory is None:
        return "none: workers send their tensors through sockets, which is slower"
    free = shutil.disk_usage(directory.parent).free
    if free < LEAST_ROOM:
        raise ConfigError(
            f"{directory.parent} has {data_size(free)} free; expected {data_size(LEAST_ROOM)} or "
            "more; see zmqtrain clean, or in Docker --shm-size"
        )
    return f"{directory.parent} has {data_size(free)} free"


def _temporary_files() -> str:
    return f"{for_small_files()} is writable"


def _open_files() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < FEWEST_FILES:
        raise ConfigError(
            f"a process may open {limit} files; expected {FEWEST_FILES} or more; see ulimit -n"
        )
    return f"a process may open {limit}"


def _ports() -> str:
    ports = [TaskConfig.model_fields["base_port"].default, *METRICS_PORTS.values()]
    taken = [str(port) for port in ports if not _is_free(port)]
    if taken:
        return f"{', '.join(taken)} taken, maybe by another job; zmqtrain run takes others"
    return f"{', '.join(map(str, ports))} are free"


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _training() -> str:
    from zmqtrain import Job, run  # a second, which only this check takes
    from zmqtrain.data import Digits
    from zmqtrain.models import MLP
    from zmqtrain.optim import Adam

    job = Job(model=MLP(64, 16, 10), data=Digits(), optimizer=Adam(0.001), steps=STEPS)
    began = time.monotonic()
    summary = run(job, workers=2)
    took = time.monotonic() - began
    return f"{summary.global_step} steps of two workers in {took:.1f} s"


CHECKS: dict[str, Callable[[], str]] = {
    "machine": _machine,
    "packages": _packages,
    "frameworks": _frameworks,
    "shared memory": _shared_memory,
    "temporary files": _temporary_files,
    "open files": _open_files,
    "ports": _ports,
    "training": _training,
}
