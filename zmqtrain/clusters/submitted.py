"""The records of the jobs that this user has submitted.

Each has a directory with its record, its keys, and, on Slurm, its scripts. They lie in the home
directory, which a login node shares with its cluster, and which outlives a restart of the machine.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.task import ENVIRON
from zmqtrain.errors import ConfigError
from zmqtrain.files import read_file, replace_file
from zmqtrain.hints import did_you_mean, explaining
from zmqtrain.transport.keys import key_files
from zmqtrain.transport.own_directory import make_private

RECORD = "job.json"
TAKEN = (
    "the name is taken; expected a new one; give another --name, or end the job that has it with "
    "zmqtrain stop"
)

RUNNING, COMPLETED, FAILED = "running", "completed", "failed"
ENDED, GONE = "ended", "gone"
"""States of a job that the engine no longer has: after its end, or by an accident."""

STOPPED = "stopped"
"""The state of a job that was removed from its engine, of which the record is left."""

OVER = (COMPLETED, FAILED, ENDED, GONE, STOPPED)
NOTE, KEPT_S = ".stopped", 30 * 86400.0
"""How the file with the note of a stopped job ends, and how long it is kept."""


def is_over(state: str) -> bool:
    """Return whether a job in this state has ended."""
    return state.partition(":")[0] in OVER


class TakenError(ConfigError):
    """The name of a job is taken."""


class WithTasks:
    """A job whose tasks follow from two fields. Without ps, worker 0 hosts the chief."""

    __slots__ = ()
    ps: int
    workers: int

    @property
    def counts(self) -> dict[Role, int]:
        """The number of tasks of each role, those first that others connect to."""
        if not self.ps:
            return {Role.WORKER: self.workers}
        return {Role.PS: self.ps, Role.CHIEF: 1, Role.WORKER: self.workers}

    @property
    def tasks(self) -> list[Task]:
        return [Task(role, i) for role, count in self.counts.items() for i in range(count)]

    @property
    def leader(self) -> Task:
        """The task that is, or hosts, ps 0."""
        return Task(Role.PS if self.ps else Role.WORKER, 0)

    @property
    def concluding(self) -> Task:
        """The task whose success is the success of the job."""
        return Task(Role.CHIEF if self.ps else Role.WORKER, 0)


@dataclass(frozen=True, slots=True)
class Submitted(WithTasks):
    """A job on an engine.

    ``keys``: the directory of its keys. ``context``, ``namespace``: where on the engine, in its own
    words. ``kind``: its kind on Kubernetes. ``words``: the arguments of `zmqtrain submit`; the
    values of variables, which may be secret, are left out. ``working``: where it was called.
    ``logdir``: "" if there is none. ``submitted_at``: Unix time, 0.0 if an older version wrote the
    record. ``stopped_at``: Unix time at which the job was removed from its
    engine, 0.0 while it is there; ``outcome``: then, how it ended, see
    :mod:`zmqtrain.observe.outcome`.
    """

    name: str
    engine: str
    job: str
    ps: int
    workers: int
    max_workers: int
    keys: str
    kind: str = ""
    context: str = ""
    namespace: str = ""
    words: tuple[str, ...] = ()
    working: str = ""
    logdir: str = ""
    stopped_at: float = 0.0
    outcome: str = ""
    submitted_at: float = 0.0

    @property
    def directory(self) -> Path:
        return directory_of(self.name)

    @property
    def is_applied_by_others(self) -> bool:
        """Whether zmqtrain has only printed it, so that it is unknown when it is applied."""
        return "--record" in self.words

    def claim(self) -> None:
        """Take the name of a new job; of two that are submitted at once, one gets it.

        Raises:
            TakenError: the name has a record already.
            ConfigError: it cannot be written.
        """
        write(self.directory, {})
        with _writing(self.directory):
            try:
                (self.directory / RECORD).touch(exist_ok=False)
            except FileExistsError:
                raise TakenError(f"{self.name} was submitted already: {TAKEN}") from None

    def save(self) -> None:
        """Write the record.

        Raises:
            ConfigError: it cannot be written.
        """
        write(self.directory, {RECORD: json.dumps(asdict(self))})

    def key_files(self) -> dict[str, str]:
        """Return the text of each file of the job's directory of keys, by name.

        Raises:
            ConfigError: they cannot be read.
        """
        return key_files(Path(self.keys))

    def retire(self, outcome: str) -> None:
        """Note that the job was stopped, and forget it otherwise; forget older such notes.

        Raises:
            ConfigError: the note cannot be written.
        """
        now = time.time()
        for job in _jobs_in(f"*{NOTE}"):
            if job.stopped_at < now - KEPT_S:
                job.forget()
        job = replace(self, stopped_at=now, outcome=outcome)
        write(_home(), {f"{self.name}{NOTE}": json.dumps(asdict(job))})
        self.forget()

    def forget(self) -> None:
        """Remove the record, and the keys that were made for the job; of a stopped job the note."""
        if self.stopped_at:
            (_home() / f"{self.name}{NOTE}").unlink(missing_ok=True)
        else:
            shutil.rmtree(self.directory, ignore_errors=True)


def submitted_jobs() -> list[Submitted]:
    """Return the jobs that were submitted and not stopped, by name."""
    return _jobs_in(f"*/{RECORD}")


def _jobs_in(pattern: str) -> list[Submitted]:
    found = []
    for path in sorted(_home().glob(pattern)):
        with contextlib.suppress(OSError, ValueError, TypeError):  # being written or removed
            fields = json.loads(read_file(path))
            found.append(Submitted(**fields | {"words": tuple(fields.get("words", ()))}))
    return found


def submitted_job(name: str, *, or_logdir: bool = False) -> Submitted:
    """Return the job of this name, stopped or not; ``or_logdir``: the command has --logdir.

    Raises:
        ConfigError: there is none.
    """
    jobs = {job.name: job for job in (*_jobs_in(f"*{NOTE}"), *submitted_jobs())}
    if name not in jobs:
        known = f"expected one of {', '.join(jobs)}" if jobs else "there is none"
        is_logdir = or_logdir and Path(name).is_dir()
        other = f"; if it is a logdir, give --logdir {name}" if is_logdir else ""
        raise ConfigError(
            f"{name} is not a job that you submitted from this home directory; {known}"
            f"{did_you_mean(name, jobs)}{other}"
        )
    return jobs[name]


def log_of(name: str, task: Task) -> str:
    """Return the command that shows the log of a task."""
    return f"zmqtrain logs {name} {task.role}={task.index}"


def directory_of(name: str) -> Path:
    return _home() / name


def write(directory: Path, texts: Mapping[str, str]) -> None:
    """Write files of a job; make the directory, for this user alone, if there is none.

    Raises:
        ConfigError: they cannot be written.
    """
    with _writing(directory):
        make_private(directory)
        for name, text in texts.items():
            replace_file(directory / name, text.encode())


def _writing(directory: Path) -> AbstractContextManager[None]:
    remedy = "expected a directory for the records of submitted jobs; set XDG_STATE_HOME to one"
    return explaining(f"{directory} cannot be written", remedy)


def _home() -> Path:
    state = ENVIRON.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "zmqtrain"
