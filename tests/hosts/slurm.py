"""Slurm as it is: Debian's slurmctld and slurmd over hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from tests.harness import Process, Stage
from tests.hosts.commands import Commands
from tests.hosts.conftest import Hosts

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "mount")
NODES = 4
CONTROLLER = NODES  # the host after the nodes

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=ctl({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldPidFile={directory}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=2,requeue_delay=3
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=disk
NodeName=n[0-{last}] CPUs=8 RealMemory=5000 Feature=fast Gres=disk:8
PartitionName=main Nodes=n0 Default=YES PriorityTier=10 PreemptMode=off
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=off
PartitionName=spot Nodes=n[1-{last}] PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
"""


class SlurmCluster(Commands):
    """Four nodes, n0 to n3, and a controller."""

    def __init__(self, stage: Stage, hosts: Hosts) -> None:
        self.stage, self.hosts = stage, hosts
        self._own = stage.directory / "slurm"
        self._names = {host: f"n{host}" for host in range(NODES)} | {CONTROLLER: "ctl"}
        (self._own / "state").mkdir(parents=True)
        lines = [f"{hosts.address(host)} {name}" for host, name in self._names.items()]
        address = hosts.address(CONTROLLER)
        files = {
            "hosts": "\n".join(["127.0.0.1 localhost", *lines, ""]),
            "slurm.conf": CONFIGURATION.format(
                address=address, directory=self._own, last=NODES - 1
            ),
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
            "gres.conf": "Name=disk Count=8\n",
        }
        for name, text in files.items():
            (self._own / name).write_text(text)

    def words(self, *command: str) -> list[str]:
        return self._on(0, *command)

    @property
    def variables(self) -> dict[str, str]:
        return super().variables | {"SLURM_CONF": str(self._own / "slurm.conf")}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the daemons; end them, and all that they have started."""
        key = self._own / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = [f"--{name}={self._own}/munge.{end}" for name, end in MUNGE.items()]
        daemons = [self._start(CONTROLLER, "munged", "--foreground", "--force", *munge)]
        try:
            self.stage.until((self._own / "munge.socket").exists, "munge")
            daemons.append(self._start(CONTROLLER, "slurmctld", "-D"))
            daemons += [self._start(n, "slurmd", "-D", "-N", f"n{n}") for n in range(NODES)]
            self.stage.until(self.is_idle, "all nodes")
            yield
            self.run("scancel", "--user=root")
            self.stage.until(self.is_idle, "the end of all jobs")
        finally:
            for daemon in reversed(daemons):
                daemon.popen.terminate()
                daemon.popen.wait()

    def is_idle(self) -> bool:
        """Say whether every node is there and has no task; each is in two partitions."""
        return len(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()) == 2 * NODES

    def _start(self, host: int, *command: str) -> Process:
        return self.stage.start(command[0], *self._on(host, *command), env=self.variables)

    def _on(self, host: int, *command: str) -> list[str]:
        own = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        unshare = ("unshare", "--uts", "sh", "-c", own, self._names[host], str(self._own / "hosts"))
        return self.hosts.command(host, *unshare, *command)


MUNGE = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def missing() -> list[str]:
    """Return the programs that are needed and not here."""
    return [program for program in PROGRAMS if shutil.which(program) is None]
