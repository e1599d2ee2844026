"""Whole jobs with keys: who trains, who is refused with the reason, and who is thrown out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.harness import Process, Stage, check_counts, status_of
from zmqtrain.actors.client import ask
from zmqtrain.errors import ExitCode
from zmqtrain.protocol.status import Status
from zmqtrain.transport.curve import make_pair
from zmqtrain.transport.keys import Owner, add_keys, revoke_key
from zmqtrain.transport.security import Security
from zmqtrain.wire.messages import Message

CLIENT = Owner("client")
STEPS = 300


class KeyedJob:
    """A cluster of which every task is given the same directory of keys."""

    def __init__(
        self, stage: Stage, job: str, *, ps: int = 1, workers: int = 2, chief: bool = True
    ) -> None:
        self.stage = stage
        self.directory = stage.directory / "keys"
        self.cluster = stage.cluster(job, ps=ps, workers=workers)
        self._counts = {"ps": ps, "worker": workers}
        self._chief = chief
        owners = [Owner(role, i) for role, count in self._counts.items() for i in range(count)]
        self.add(*owners, Owner("chief"), CLIENT)
        self.tasks: dict[str, Process] = {}

    def add(self, *owners: Owner) -> None:
        add_keys(self.directory, {owner: make_pair() for owner in owners})

    def start(self, role: str, index: int = 0, *flags: str | Path) -> Process:
        chief = () if self._chief else ("--no-chief",)
        return self.cluster.start(role, index, "--keys", self.directory, *chief, *flags)

    def start_all(self, *flags: str) -> None:
        for role, count in self._counts.items():
            for index in range(count):
                self.tasks[f"{role} {index}"] = self.start(role, index, *flags)
        if self._chief:
            self.tasks["chief"] = self.start("chief", 0, *flags)

    def ask(self, message: Message, owner: Owner = CLIENT) -> Message:
        return ask(self.cluster.leader, message, timeout_s=5.0, security=self._security(owner))

    def until(self, condition: Callable[[Status], object], what: str) -> Status:
        security = self._security(CLIENT)
        return self.stage.until_told(
            lambda: status_of(self.cluster.leader, security), condition, what
        )

    def _security(self, owner: Owner) -> Security:
        servers = {f"tcp://{self.cluster.leader}": Owner("ps")}
        return Security(owner, self.directory, servers=servers)

    def end(self) -> None:
        """Have the job end, which must go well."""
        self.stage.open_gate()
        codes = {name: task.exit_code() for name, task in self.tasks.items()}
        assert codes == dict.fromkeys(codes, 0), self.stage.report


def test_job_with_keys_trains_and_obeys_clients(stage: Stage) -> None:
    """Worker 0 hosts the chief: each of the two has its own key."""
    path = stage.job(
        "counting_job", gated=True, policy="hogwild:whole", steps=STEPS, logdir=str(stage.logdir)
    )
    job = KeyedJob(stage, path, ps=2, chief=False)
    job.start_all("--lane", "tcp", "--lease-s", "60")  # nobody dies, and a busy machine is slow
    job.until(lambda status: status.step > 0, "the first step")
    leader = ("--ps", job.cluster.leader)
    told = stage.start(
        "policy", sys.executable, "-m", "zmqtrain", "policy", "bounded-staleness:3", *leader,
        env={"ZMQTRAIN_KEYS": str(job.directory)},
    )  # fmt: skip
    assert told.exit_code() == 0, str(told)
    without = stage.start("status", sys.executable, "-m", "zmqtrain", "status", *leader)
    assert without.exit_code() == ExitCode.REFUSED, str(without)
    assert "it takes encrypted connections only; give --keys DIR" in without.log
    job.end()
    assert len(check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}")) == STEPS
    assert job.tasks["worker 0"].lines("WARNING|ERROR") == []


def working(status: Status) -> int:
    return sum(task.task.startswith("worker") and task.step > 0 for task in status.tasks)


def test_worker_whose_key_is_revoked_is_dropped_and_the_job_goes_on(stage: Stage) -> None:
    path = stage.job(
        "counting_job", gated=True, policy="hogwild:whole", steps=STEPS, logdir=str(stage.logdir)
    )
    job = KeyedJob(stage, path)
    job.start_all()
    job.until(lambda status: working(status) == 2, "a step of both workers")
    revoked = job.tasks.pop("worker 1")
    revoke_key(job.directory, Owner("worker", 1))
    assert revoked.exit_code() == ExitCode.REFUSED, str(revoked)
    assert revoked.lines("ps 0 at .*: it does not admit the key of worker 1"), str(revoked)
    ps = job.tasks["ps 0"]
    assert ps.lines("WARNING .*the key of worker 1 is no longer allowed"), str(ps)
    ps.until_line("worker 1 has lost its key: it has left")
    job.add(Owner("worker", 1))
    job.tasks["worker 1"] = job.start("worker", 1)
    job.tasks["worker 1"].until_line("metrics at ")
    ps.until_line(rf"worker 1 joined \(\S+:{job.tasks['worker 1'].pid},")
    job.end()
    assert len(check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}")) == STEPS
