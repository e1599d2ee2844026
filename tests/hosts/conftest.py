"""Jobs over several hosts of one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.hosts import Hosts, run
from tests.harness import Cluster, Process, Stage, stage, status_of
from zmqtrain.cli.main import main
from zmqtrain.protocol.status import Status, TaskStatus
from zmqtrain.transport.keys import REGISTRY, Owner, secret_path
from zmqtrain.transport.security import Security

__all__ = ["stage"]

WORKERS = 2
CLIENT = Owner("client")


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
        return self.stage.until_told(lambda: self.hosts.inside(0, self._status), condition, what)

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
        return status_of(address, Security(CLIENT, self._directory(0) / "keys", servers=servers))

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
            run(*hosts.command(0, "mount", "--bind", "/tmp", "/tmp"))
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
