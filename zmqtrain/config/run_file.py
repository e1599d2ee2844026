"""Small files by which `zmqtrain status` finds a job on this host.

Both the chief and ps 0 write one, so that the job is found while the chief is away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from zmqtrain.config.cluster import Role, connect_endpoint
from zmqtrain.errors import ConfigError
from zmqtrain.files import read_file
from zmqtrain.transport.own_directory import for_small_files

NOTE_S = 3600.0
"""A worker that is started again so long after the end of its job waits in vain."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose chief, or whose ps 0, is the process ``pid`` of this host."""

    pid: int
    job: str
    ps: tuple[str, ...]
    task: str
    metrics: str = ""  # address at which it serves them


@contextlib.contextmanager
def published(job: str, ps: tuple[str, ...], task: str, metrics: str = "") -> Iterator[None]:
    """Write the file of this process, and remove it at the end of the block.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = for_small_files() / f"{os.getpid()}.json"
    _files(path.parent)  # removes the file of a killed task
    try:
        _write(path, json.dumps(asdict(RunningJob(os.getpid(), job, ps, task, metrics))))
        yield
    finally:
        path.unlink(missing_ok=True)


def running_jobs() -> list[RunningJob]:
    """Return the jobs of this user whose chief or ps 0 is alive; remove files of dead processes.

    If a job has both, the chief's file counts.
    """
    jobs: dict[str, RunningJob] = {}
    for path in _files(for_small_files()):
        try:
            fields = json.loads(read_file(path))
            job = RunningJob(**fields | {"ps": tuple(fields["ps"])})
            leader = connect_endpoint(job.ps[0])  # tasks may spell it differently
        except (OSError, ValueError, LookupError, TypeError, ConfigError):
            continue  # being written or removed
        if leader not in jobs or job.task.startswith(Role.CHIEF):
            jobs[leader] = job
    return list(jobs.values())


def note_end(ps: tuple[str, ...], exit_code: int) -> None:
    """Record on this host that the job of these ps has ended, with this exit code.

    A worker that is restarted after the end reads it with `end_since`.

    Raises:
        ConfigError: the file cannot be written.
    """
    _write(_end_file(ps), json.dumps({"at": time.time(), "exit_code": exit_code}))


def end_since(ps: tuple[str, ...], since: float) -> int | None:
    """Return the exit code of a job of these ps that ended on this host after ``since``.

    ``since`` is a Unix time. A job that ended before it was another one at the same addresses.
    """
    try:
        note = json.loads(read_file(_end_file(ps)))
        return int(note["exit_code"]) if note["at"] > since else None
    except (OSError, ValueError, LookupError, TypeError, ConfigError):
        return None


def old_notes() -> list[Path]:
    """Return the notes of ends that no worker will read any more: those older than an hour."""
    limit = time.time() - NOTE_S
    return [path for path in for_small_files().glob("*.ended") if path.stat().st_mtime < limit]


def _end_file(ps: tuple[str, ...]) -> Path:
    name = hashlib.blake2b(",".join(ps).encode(), digest_size=8).hexdigest()
    return for_small_files() / f"{name}.ended"


def _files(directory: Path) -> list[Path]:
    """Return the files of live processes, which are named by pid; remove the others."""
    files = sorted(directory.glob("*.json"))
    living = [path for path in files if path.stem.isdecimal() and psutil.pid_exists(int(path.stem))]
    for path in set(files).difference(living):
        path.unlink(missing_ok=True)
    return living


def _write(path: Path, text: str) -> None:
    """Write a whole file, also if several tasks of a job note its end at once."""
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; expected room for a small file; free "
            "some space, or set TMPDIR"
        ) from None
    finally:
        draft.unlink(missing_ok=True)
