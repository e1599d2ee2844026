"""Hosts that are logged in to by ssh: Debian's sshd on hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.harness import Process, Stage, status_of
from tests.hosts.commands import NAME, Commands, ReadStatus
from tests.hosts.conftest import Hosts
from zmqtrain.clusters.plan import port_of
from zmqtrain.transport.keys import Owner
from zmqtrain.transport.security import Security

SSHD = "/usr/sbin/sshd"  # it has to be called by its whole path
PROGRAMS = (SSHD, "ssh", "ssh-keygen", "unshare", "mount")
NAMES = {1: "alpha", 2: "beta"}
SUBMITTER = 0  # the host from which a job is submitted

CONFIGURATION = """\
ListenAddress {address}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/key.pub
PidFile none
StrictModes no
UsePAM no
LogLevel ERROR
SetEnv {variables}
"""
CLIENT = """\
IdentityFile {directory}/key
UserKnownHostsFile {directory}/known_hosts
{hosts}
"""


class Logins(Commands):
    """A submitter, and hosts alpha and beta, each with a home and memory of its own."""

    def __init__(self, stage: Stage, hosts: Hosts) -> None:
        self.stage, self.hosts = stage, hosts
        self._own = stage.directory / "ssh"
        programs = self._own / "programs"
        programs.mkdir(parents=True)
        for key in ("key", "host_key"):
            path = str(self._own / key)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        public = (self._own / "host_key.pub").read_text()
        addresses = {name: hosts.address(host) for host, name in NAMES.items()}
        known = "".join(f"{address} {public}" for address in addresses.values())
        (self._own / "known_hosts").write_text(known)
        named = (f"Host {name}\n  HostName {ip}\n  User root" for name, ip in addresses.items())
        configuration = CLIENT.format(directory=self._own, hosts="\n".join(named))
        (self._own / "config").write_text(configuration)
        # The user's configuration of ssh is that of his home in /etc/passwd, whatever HOME says.
        wrapper = programs / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self._own}/config "$@"\n')
        wrapper.chmod(0o755)

    def home(self, name: str) -> Path:
        return self.stage.directory / f"home-{name}"

    def words(self, *command: str) -> list[str]:
        return self.hosts.command(SUBMITTER, *command)

    @property
    def variables(self) -> dict[str, str]:
        inherited = super().variables
        return inherited | {"PATH": f"{self._own}/programs:{inherited['PATH']}"}

    @property
    def leader(self) -> str:
        """Address of ps 0."""
        return f"{self.hosts.address(1)}:{port_of(zlib.crc32(NAME.encode()))}"

    def status(self) -> ReadStatus | None:
        """Ask directly, for that is fast."""
        keys = self.stage.directory / "state/zmqtrain" / NAME / "keys"
        security = Security(Owner("client"), keys, servers={f"tcp://{self.leader}": Owner("ps")})

        status = self.hosts.inside(SUBMITTER, lambda: status_of(self.leader, security))
        return None if status is None else asdict(status)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run sshd on both hosts."""
        Path("/run/sshd").mkdir(exist_ok=True)
        daemons = [self._start(host) for host in NAMES]
        try:
            yield
        finally:
            for daemon in daemons:
                daemon.popen.terminate()
                daemon.popen.wait()

    def _start(self, host: int) -> Process:
        name, address = NAMES[host], self.hosts.address(host)
        self.home(name).mkdir()
        environment = self.stage.environment()
        inherited = environment.keys() & {"TMPDIR", "PYTHONPATH"}
        variables = {
            **{key: environment[key] for key in sorted(inherited)},
            "HOME": str(self.home(name)),
            "ZMQTRAIN_SEGMENT_DIR": str(self.stage.directory / f"segments-{name}"),
            "ZMQTRAIN_LEASE_S": "2",
        }
        text = CONFIGURATION.format(
            address=address,
            directory=self._own,
            variables=" ".join(f"{key}={value}" for key, value in variables.items()),
        )
        path = self._own / f"{name}.conf"
        path.write_text(text)
        own = 'hostname "$0" && exec "$@"'
        unshare = ("unshare", "--uts", "sh", "-c", own, name)
        command = self.hosts.command(host, *unshare, SSHD, "-D", "-e", "-f", str(path))
        return self.stage.start("sshd", *command)


def missing() -> list[str]:
    """Return the programs that are needed and not here."""
    return [program for program in PROGRAMS if shutil.which(program) is None]
