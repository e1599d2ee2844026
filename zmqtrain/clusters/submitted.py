"""The records of the jobs that this user has submitted.

Each has a directory with its record, its keys, and, on Slurm, its scripts. They lie in the home
directory, which a login node shares with its cluster, and which outlives a restart of the machine.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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

OVER = (COMPLETED, ENDED, GONE)


def is_over(state: str) -> bool:
    """Return whether a job in this state has ended without failing."""
    return state.partition(":")[0] in OVER


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job on an engine.

    ``keys``: the directory of its keys. ``context``, ``namespace``: where on the engine, in its own
    words. ``kind``: what it is on Kubernetes.
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

    @property
    def tasks(self) -> list[Task]:
        """All tasks, those that others connect to first."""
        counts = {Role.PS: self.ps, Role.CHIEF: int(self.ps > 0), Role.WORKER: self.workers}
        return [Task(role, index) for role, count in counts.items() for index in range(count)]

    def claim(self) -> None:
        """Take the name of a new job; of two that are submitted at once, one gets it.

        Raises:
            ConfigError: the name has a record already, or it cannot be written.
        """
        write(self.directory, {})
        try:
            with (self.directory / RECORD).open("x"):
                pass
        except FileExistsError:
            raise ConfigError(f"{self.name} was submitted already: {TAKEN}") from None
        except OSError as error:
            raise _unwritable(self.directory, error) from None

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

    def forget(self) -> None:
        """Remove the record, and the keys that were made for the job."""
        shutil.rmtree(self.directory, ignore_errors=True)


def submitted_jobs() -> list[Submitted]:
    """Return the jobs that were submitted and not removed, by name."""
    found = []
    for path in sorted(_home().glob(f"*/{RECORD}")):
        with contextlib.suppress(OSError, ValueError, TypeError):  # being written or removed
            found.append(Submitted(**json.loads(read_file(path))))
    return found


def submitted_job(name: str) -> Submitted:
    """Return the job of this name.

    Raises:
        ConfigError: there is none.
    """
    jobs = {job.name: job for job in submitted_jobs()}
    if name not in jobs:
        known = f": {', '.join(jobs)}" if jobs else "; there is none"
        raise ConfigError(
            f"{name} is no job that this user submitted from this home directory{known}"
            f"{did_you_mean(name, jobs)}"
        )
    return jobs[name]


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
