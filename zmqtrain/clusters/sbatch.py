"""A submitted job on Slurm, by sbatch, squeue and scancel, on a host where these work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from zmqtrain.clusters.engine import Engine, Reason, Remedies, not_running, not_scaled, tally
from zmqtrain.clusters.plan import SubmitPlan, port_of
from zmqtrain.clusters.programs import Programs, Write
from zmqtrain.clusters.slurm import PREFIX, ended_file, log_file, render
from zmqtrain.clusters.submission import Submission
from zmqtrain.clusters.submitted import ENDED, TAKEN, Submitted, TakenError, directory_of, write
from zmqtrain.config.cluster import Role, Task
from zmqtrain.errors import ConfigError, NotRunningError, OccupiedError, PeerLostError, RefusedError
from zmqtrain.files import read_file
from zmqtrain.observe.outcome import outcome_in

_TOO_MUCH = r"configuration is not available|generic resource|[Mm]emory specification can ?not be"
_AWAY = (
    r"[Uu]nable to contact slurm controller|[Cc]onnection refused|timed out|in standby mode|"
    r"configuration source|DNS SRV lookup|fetch config|Zero Bytes were transmitted"
)
PROGRAMS = Programs(
    {
        ConfigError: {
            r"[Ii]nvalid partition": (
                "there is no such partition; expected one that sinfo lists; correct --partition or "
                "--worker-partition"
            ),
            _TOO_MUCH: (
                "no node of the partition has what a task asks for; expected as much as sinfo "
                "-Nl shows; ask for less, or for another partition"
            ),
        },
        OccupiedError: {
            r"(QOS\w*|Assoc\w*)Limit|accounting/QOS policy": (
                "your quota on this cluster is used up; wait for other jobs, or ask for less"
            ),
        },
        RefusedError: {
            r"[Ii]nvalid account|[Pp]ermission denied|not permitted": (
                "Slurm does not let you submit there; expected an account with the right to; "
                "ask the administrators of the cluster"
            ),
        },
        PeerLostError: {
            _AWAY: ("Slurm does not answer; try sinfo; is this a host of the cluster?"),
        },
    }
)

REMEDIES: Remedies = {
    r": Resources": "no node has enough free resources",
    r": Priority": "jobs of higher priority go first",
    r": Dependency$": "it waits for the ps to start",
    r": BeginTime": "it was requeued, and starts again soon",
    r"ReqNodeNotAvail": "a node that it needs is down or reserved",
    r"PartitionConfig|BadConstraints": "no node of the partition has so much; submit it with less",
    r": (QOS|Assoc)": "your quota is used up; wait for other jobs, or submit it with less",
    r"out_of_memory": "submit it with more --memory, or, if it is a ps, --ps-memory",
    r"timeout": "submit it again: it goes on from its checkpoint",
    r"NonZeroExitCode": "see its log",
}

LOST = "FAILED,OUT_OF_MEMORY,TIMEOUT,NODE_FAIL"
"""States of jobs that Slurm does not run again, and forgets after some minutes."""

FIRST = "first_batch_job"
"""The file, beside the record of a job, with the number of its first batch job."""

UNLISTED = (
    "Slurm no longer lists its batch job, as after scancel, but other tasks run or wait; zmqtrain "
    "stop {0} ends them, and zmqtrain resubmit {0} submits it again"
)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch job, or an element of an array: its number, the task that it runs (a ps for ps and
    chief), and its state, with the reason why it does not run, and its nodes."""

    number: str
    task: Task
    state: str
    reason: str
    nodes: str


class Slurm(Engine):
    """The cluster that this host belongs to; an engine of jobs, with the directory of logs."""

    reads_our_keys: ClassVar[bool] = True

    @classmethod
    def chosen(cls, asked: Submission) -> Self:
        return cls(str(Path.cwd()))

    @staticmethod
    def rendered(plan: SubmitPlan) -> str:
        return "".join(render(plan).values())

    def check(self, plan: SubmitPlan, *, dry_run: bool) -> None:
        scripts = render(plan)
        if _parts(plan.name):
            raise TakenError(f"squeue lists jobs of {plan.name}: {TAKEN}")
        for text in scripts.values() if dry_run else ():
            PROGRAMS.call(["sbatch", "--test-only", *options_in(text)], stdin=text)

    def submit(self, plan: SubmitPlan) -> str:
        scripts, directory, numbers = render(plan), directory_of(plan.name), list[str]()
        write(directory, scripts)
        Path(self.context, ended_file(plan.name)).unlink(missing_ok=True)  # of a former job
        for name in scripts:
            after = [f"--dependency=after:{numbers[0]}"] if numbers else []
            numbers.append(_submitted(directory / name, *after))
            write(directory, {FIRST: numbers[0]})  # at once: the next one may be refused
        return f"Slurm: jobs {' and '.join(numbers)}"

    def state(self, job: Submitted) -> str:
        if running := tally([part.state.lower() for part in _parts(job.name)]):
            return running
        lost = tally([part.state.lower() for part in _lost(job)])
        return f"{ENDED}: {lost}" if lost else ENDED

    def outcome(self, job: Submitted) -> str:
        with contextlib.suppress(OSError):
            return read_file(Path(self.context, ended_file(job.name))).decode(errors="replace")
        return ""

    def reasons(self, job: Submitted) -> list[Reason]:
        listed = _parts(job.name)
        parts = [*listed, *_lost(job)]
        found = [
            Reason(str(part.task), f"{part.state.lower()}: {part.reason}").with_remedies(REMEDIES)
            for part in parts
            if part.state != "RUNNING"
        ]
        is_gone = listed and job.leader not in (part.task for part in parts)
        ended = outcome_in(self.outcome(job))  # a job that has ended is listed while it completes
        if is_gone and (ended is None or ended.exit_code == PeerLostError.exit_code):
            found.append(Reason(str(job.leader), UNLISTED.format(job.name)))
        return found

    @contextlib.contextmanager
    def located(self, job: Submitted) -> Iterator[str]:
        parts = _parts(job.name)
        for part in parts:
            if part.task == job.leader and part.state == "RUNNING":
                (host, *_) = PROGRAMS.call(["scontrol", "show", "hostnames", part.nodes]).split()
                yield f"{host}:{port_of(int(part.number))}"
                return
        if parts:
            raise not_running(job.leader, job.name)
        raise NotRunningError(f"{job.name} has ended: Slurm no longer lists it; see its log")

    def scale(self, job: Submitted, workers: int) -> None:
        held = _workers_of(job.name)
        _cancel(*(part.number for index, part in held.items() if index >= workers))
        if absent := sorted(set(range(workers)) - set(held)):
            script = job.directory / f"{job.name}.worker.sbatch"
            _submitted(script, f"--array={','.join(map(str, absent))}", f"--chdir={self.context}")
        if (found := len(_workers_of(job.name))) != workers:
            raise not_scaled(f"squeue lists {found}", job, workers)

    def logs(
        self, job: Submitted, task: Task, out: Write, *, follow: bool, previous: bool = False
    ) -> None:
        path = Path(self.context) / log_file(job.name, task.role, task.index)
        if not path.exists():
            raise PeerLostError(f"{path} is not there yet: {task} of {job.name} has not started")
        PROGRAMS.show(["tail", "-n", "+1", *(["-F"] if follow else []), str(path)], out)

    def remove(self, job: Submitted) -> None:
        _cancel(*(part.number for part in _parts(job.name)))


def parts_of(listing: str, name: str) -> list[BatchJob]:
    """Return the parts of a job in a listing of squeue with :data:`FORMAT`."""
    found = []
    for line in listing.splitlines():
        array, index, title, state, reason, nodes = line.split("|")
        role = Role.WORKER if title == f"{name}-worker" else Role.PS
        number = f"{array}_{index}" if index != "N/A" else array
        task = Task(role, int(index) if index.isdecimal() else 0)
        found.append(BatchJob(number, task, state, reason, nodes))
    return found


FORMAT = "%F|%K|%j|%T|%r|%N"


def _parts(name: str, *options: str) -> list[BatchJob]:
    """Return the parts of a job that run or wait, or those that the options ask for."""
    names = f"{name}-ps,{name}-worker"
    words = ["squeue", "--noheader", "--me", "-r", "-n", names, "-o", FORMAT, *options]
    return parts_of(PROGRAMS.call(words), name)


def _lost(job: Submitted) -> list[BatchJob]:
    """Return the parts that Slurm does not run again, but not those of a former job of the name."""
    first = 0
    with contextlib.suppress(OSError, ValueError):  # no note, or a damaged one
        first = int((job.directory / FIRST).read_text())
    parts = _parts(job.name, f"--states={LOST}")
    return [part for part in parts if int(part.number.partition("_")[0]) >= first]


def _workers_of(name: str) -> dict[int, BatchJob]:
    """Return the workers that run or wait, by their index."""
    parts = [part for part in _parts(name) if part.state != "COMPLETING"]
    return {part.task.index: part for part in parts if part.task.role is Role.WORKER}


def options_in(script: str) -> list[str]:
    """Return the options in a script; on a command line they override SBATCH_ variables."""
    lines = script.splitlines()
    return [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]


def _submitted(script: Path, *options: str) -> str:
    held = options_in(script.read_text())
    printed = PROGRAMS.call(["sbatch", "--parsable", *held, *options, str(script)])
    return printed.strip().partition(";")[0]


def _cancel(*numbers: str) -> None:
    if numbers:
        PROGRAMS.call(["scancel", "--quiet", *numbers])  # some may have ended meanwhile
