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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.task import ENVIRON
from zmqtrain.errors import ConfigError, did_you_mean
from zmqtrain.files import read_file, replace_file
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
KEPT_S = 30 * 86400.0
"""The time for which the record of a stopped job is kept."""


def is_over(state: str) -> bool:
    """Return whether a job in this state has ended."""
    return state.partition(":")[0] in OVER


class TakenError(ConfigError):
    """The name of a job is taken."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job on an engine.

    ``keys``: the directory of its keys. ``context``, ``namespace``: where on the engine, in its own
    words. ``kind``: what it is on Kubernetes. ``words``: the arguments of `zmqtrain submit`; the
    values of variables, which may be secret, are left out. ``working``: where it was called.
    ``logdir``: "" if there is none. ``stopped_at``: Unix time at which the job was removed from its
    engine, 0.0 while it is there; ``ending``: then, how it ended, see
    :mod:`zmqtrain.observe.ending`.
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
    ending: str = ""

    @property
    def directory(self) -> Path:
        return directory_of(self.name)

    @property
    def leader(self) -> Task:
        """The task that is, or hosts, ps 0."""
        return Task(Role.PS if self.ps else Role.WORKER, 0)

    @property
    def concluding(self) -> Task:
        """The task whose success is the success of the job."""
        return Task(Role.CHIEF if self.ps else Role.WORKER, 0)

    def claim(self) -> Submitted | None:
        """Take the name of a new job; of two that are submitted at once, one gets it.

        Return the stopped job that had the name, if there was one.

        Raises:
            TakenError: the name has the record of a job that was not stopped.
            ConfigError: the record cannot be written.
        """
        write(self.directory, {})
        former = _read(self.directory / RECORD)
        if former is not None and not former.stopped_at:
            former = None
        if former is not None:
            (self.directory / RECORD).unlink(missing_ok=True)
        try:
            with (self.directory / RECORD).open("x"):
                pass
        except FileExistsError:
            raise TakenError(f"{self.name} was submitted already: {TAKEN}") from None
        except OSError as error:
            raise _unwritable(self.directory, error) from None
        return former

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

    def retire(self, ending: str) -> None:
        """Note that the job was stopped; remove the keys that were made for it, and old records.

        Raises:
            ConfigError: the record cannot be written.
        """
        now = time.time()
        for job in _records():
            if job.name == self.name or 0 < job.stopped_at < now - KEPT_S:
                job.forget()
        replace(self, stopped_at=now, ending=ending).save()

    def forget(self, former: Submitted | None = None) -> None:
        """Remove the record, and the keys that were made for the job.

        ``former``: the stopped job whose record comes back.
        """
        shutil.rmtree(self.directory, ignore_errors=True)
        if former is not None:
            former.save()


def submitted_jobs() -> list[Submitted]:
    """Return the jobs that were submitted and not stopped, by name."""
    return [job for job in _records() if not job.stopped_at]


def _records() -> list[Submitted]:
    found = map(_read, sorted(_home().glob(f"*/{RECORD}")))
    return [job for job in found if job is not None]


def _read(path: Path) -> Submitted | None:
    """Return the job of a record, None if the file is being written or removed."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        fields = json.loads(read_file(path))
        return Submitted(**fields | {"words": tuple(fields.get("words", ()))})
    return None


def submitted_job(name: str) -> Submitted:
    """Return the job of this name, stopped or not.

    Raises:
        ConfigError: there is none.
    """
    jobs = {job.name: job for job in _records()}
    if name not in jobs:
        known = f": {', '.join(jobs)}" if jobs else "; there is none"
        raise ConfigError(
            f"{name} is no job that this user submitted from this home directory{known}"
            f"{did_you_mean(name, jobs)}"
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
    try:
        make_private(directory)
        for name, text in texts.items():
            replace_file(directory / name, text.encode())
    except OSError as error:
        raise _unwritable(directory, error) from None


def _unwritable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{directory} cannot be written: {error.strerror}; expected a directory for the "
        "records of submitted jobs; set XDG_STATE_HOME to one"
    )


def _home() -> Path:
    state = ENVIRON.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "zmqtrain"
