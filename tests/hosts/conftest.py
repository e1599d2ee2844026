"""Hosts on one machine: network namespaces on a switch that loses what it is told to lose.

Nothing of the machine's own network is touched; all of it is gone at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from tests.harness import Cluster, Process, Stage, check_counts_fixture, stage
from zmqtrain.actors.client import ask
from zmqtrain.cli.main import main
from zmqtrain.errors import ZmqTrainError
from zmqtrain.transport.keys import REGISTRY, Owner, secret_path
from zmqtrain.transport.security import Security
from zmqtrain.wire.messages import GetStatus, Status, TaskStatus

__all__ = ["check_counts_fixture", "stage"]

WORKERS = 2
NAMESPACES = Path("/var/run/netns")
CLIENT = Owner("client")
# What is programmed into the switch to lose a packet: return TC_ACT_SHOT. Unlike netem's loss,
# most kernels have it; and the host that sends does not notice, as it would if its own queue lost.
LOSE = ("bpf", "direct-action", "bytecode", "1,6 0 0 2,")
_CLONE_NEWNET = 0x40000000

Result = TypeVar("Result")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


class Hosts:
    """Hosts 0, 1, ... at a switch, each of them a network namespace of its own."""

    def __init__(self, count: int) -> None:
        self._token = secrets.token_hex(3)
        self._hosts = range(count)
        self._inside = [
            ThreadPoolExecutor(1, initializer=_enter, initargs=(self._path(self.namespace(host)),))
            for host in self._hosts
        ]

    @property
    def _switch(self) -> str:
        return f"zmqtrain-{self._token}-switch"

    def namespace(self, host: int) -> str:
        return f"zmqtrain-{self._token}-{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> Hosts:
        """Raises CalledProcessError if this machine does not offer what is needed."""
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "dev", "bridge", "up")
        for host in self._hosts:
            own, port = self.namespace(host), _port(host)
            _run("ip", "netns", "add", own)
            wire = ("type", "veth", "peer", "name", port, "netns", self._switch)
            _run("ip", "-n", own, "link", "add", "eth0", *wire)
            _run("ip", "-n", self._switch, "link", "set", "dev", port, "master", "bridge", "up")
            _run("tc", "-n", self._switch, "qdisc", "add", "dev", port, "clsact")
            _run("ip", "-n", own, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", own, "link", "set", "dev", device, "up")

    def close(self) -> None:
        """Remove what was made; what still runs in a host keeps it until it ends."""
        for inside in self._inside:
            inside.shutdown()
        for name in (*map(self.namespace, self._hosts), self._switch):
            if self._path(name).exists():
                _run("ip", "netns", "delete", name)

    def cut(self, host: int, *, hears: bool = False, is_heard: bool = False) -> None:
        """Lose what is sent to a host, unless it ``hears``, and by it, unless it ``is_heard``."""
        for way, is_open in (("egress", hears), ("ingress", is_heard)):
            if not is_open:
                port = ("dev", _port(host), way)
                _run("tc", "-n", self._switch, "filter", "add", *port, *LOSE)

    def throttle(self, host: int, mbit_s: float) -> None:
        """Have each direction of a host's link carry this many Mbit/s."""
        self._queue(host, "tbf", "rate", f"{mbit_s}mbit", "burst", "32kb", "latency", "100ms")

    def heal(self, host: int) -> None:
        """Let a host's link be as it was in the beginning."""
        for change in ("delete", "add"):  # with all that hangs on it
            _run("tc", "-n", self._switch, "qdisc", change, "dev", _port(host), "clsact")
        self._queue(host, "noqueue")

    def command(self, host: int, *command: str) -> list[str]:
        """Return how to start a command on a host, as the process that is started."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def inside(self, host: int, work: Callable[[], Result]) -> Result:
        """Return what ``work`` returns, done by a thread whose network is that of a host."""
        return self._inside[host].submit(work).result()

    def _queue(self, host: int, *discipline: str) -> None:
        """Have packets wait so, at both ends of a host's link, before they go through."""
        for namespace, device in ((self.namespace(host), "eth0"), (self._switch, _port(host))):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *discipline)

    def _path(self, namespace: str) -> Path:
        return NAMESPACES / namespace


def _port(host: int) -> str:
    return f"port{host}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _enter(namespace: Path) -> None:
    """Give the calling thread another network."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(descriptor)


class SpreadJob:
    """A job over several hosts: ps 0 and the chief on host 0, worker i on host i + 1.

    Each host has the keys of its own tasks only, and a directory for segments that no other sees.
    """

    def __init__(self, stage: Stage, hosts: Hosts, job: str, *flags: str) -> None:
        """``flags`` are for every task."""
        self.stage = stage
        self.hosts = hosts
        self.cluster = Cluster(stage, job, [f"{hosts.address(0)}:2222"], WORKERS)
        self.tasks: dict[str, Process] = {}
        self._flags = flags
        self._make_directories()

    @property
    def ps(self) -> Process:
        return self.tasks["ps 0"]

    def start(self, role: str, index: int = 0) -> Process:
        """Start one task on its host."""
        host = index + 1 if role == "worker" else 0
        keys = ("--keys", str(self._directory(host) / "keys"))
        command = self.cluster.command(role, index, *keys, *self._flags)
        task = self.tasks[f"{role} {index}"] = self.start_on(host, role, *command)
        return task

    def start_all(self) -> None:
        for role, index in [("ps", 0), ("chief", 0), *(("worker", i) for i in range(WORKERS))]:
            self.start(role, index)

    def start_on(self, host: int, name: str, *command: str) -> Process:
        """Start any command on a host."""
        own = 'mount --bind "$0" "$1" && shift && exec "$@"'
        mounts = (str(self._directory(host) / "segments"), str(self.stage.segments))
        return self.stage.start(name, *self.hosts.command(host, "sh", "-c", own, *mounts, *command))

    def status_command(self) -> list[str]:
        """Return how someone on host 0 asks for the status as JSON."""
        keys = self._directory(0) / "keys"
        where = ("--ps", self.cluster.leader, "--keys", str(keys))
        return [sys.executable, "-m", "zmqtrain", "status", "--json", *where]

    def until(self, condition: Callable[[Status], object], what: str) -> Status:
        """Return the first status for which ``condition`` is true."""

        def found() -> Status | None:
            status = self.hosts.inside(0, self._status)
            return status if status is not None and condition(status) else None

        return self.stage.until(found, what)

    def until_worker(
        self, index: int, condition: Callable[[TaskStatus], object], what: str
    ) -> TaskStatus:
        """Return the first status of a worker for which ``condition`` is true."""

        def own(status: Status) -> list[TaskStatus]:
            return [task for task in status.tasks if task.task == f"worker {index}"]

        return own(self.until(lambda s: any(map(condition, own(s))), f"worker {index}: {what}"))[0]

    def until_steps(self) -> list[TaskStatus]:
        """Return the status of every worker, each of which has made some steps in this life."""
        return [
            self.until_worker(i, lambda w: w.state != "left" and w.step > 2, "some steps")
            for i in range(WORKERS)
        ]

    def end(self) -> None:
        """Have the job end, which must go well."""
        self.stage.open_gate()
        codes = {name: task.exit_code() for name, task in self.tasks.items()}
        assert codes == dict.fromkeys(codes, 0), self.stage.report

    def _status(self) -> Status | None:
        address = self.cluster.leader
        servers = {f"tcp://{address}": Owner("ps")}
        security = Security(CLIENT, self._directory(0) / "keys", servers=servers)
        with contextlib.suppress(ZmqTrainError):
            message = ask(address, GetStatus(), timeout_s=2.0, security=security)
            return message if isinstance(message, Status) else None
        return None

    def _directory(self, host: int) -> Path:
        return self.stage.directory / f"host-{host}"

    def _make_directories(self) -> None:
        made = self.stage.directory / "keys"
        assert main(["keys", "new", "--keys", str(made), "--workers", str(WORKERS)]) == 0
        owners: list[tuple[Owner, ...]] = [(Owner("ps"), Owner("chief"), CLIENT)]
        owners += [(Owner("worker", index),) for index in range(WORKERS)]
        self.stage.segments.mkdir(mode=0o700)
        for host, own in enumerate(owners):
            keys = self._directory(host) / "keys"
            keys.mkdir(parents=True, mode=0o700)
            (self._directory(host) / "segments").mkdir(mode=0o700)
            for path in (made / REGISTRY, *(secret_path(made, owner) for owner in own)):
                shutil.copy2(path, keys)


@pytest.fixture(scope="session")
def _able() -> None:
    """Skip where no hosts can be made, and say what is missing."""
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    if missing := [tool for tool in ("ip", "tc", "mount") if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} is not installed (iproute2, util-linux)")
    try:
        with Hosts(2) as hosts:
            hosts.cut(0)
            hosts.heal(0)
            hosts.throttle(0, 1)
            hosts.inside(0, lambda: None)
            _run(*hosts.command(0, "mount", "--bind", "/tmp", "/tmp"))
    except subprocess.CalledProcessError as error:
        command = " ".join(error.cmd)
        pytest.skip(f"this machine makes no hosts: {command}: {error.stderr.strip()}")


@pytest.fixture
def hosts(stage: Stage, _able: None) -> Iterator[Hosts]:
    """One host for ps and chief, and one for each worker."""
    with Hosts(1 + WORKERS) as hosts:
        yield hosts


@pytest.fixture
def spread(stage: Stage, hosts: Hosts) -> Callable[..., SpreadJob]:
    """Makes a job over these hosts, given its file and flags for all its tasks."""
    return partial(SpreadJob, stage, hosts)
