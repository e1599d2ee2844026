"""How `zmqtrain status` finds a job that runs on this host: a small file for each live chief."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from zmqtrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose chief runs on this host."""

    pid: int
    job: str
    ps: tuple[str, ...]


@contextlib.contextmanager
def published(job: str, ps: tuple[str, ...]) -> Iterator[None]:
    """Make the job known on this host for as long as the block lasts.

    Raises:
        ConfigError: there is no directory for that, or no room.
    """
    path = _directory() / f"{os.getpid()}.json"
    try:
        _write(path, json.dumps(asdict(RunningJob(os.getpid(), job, ps))))
        yield
    finally:
        path.unlink(missing_ok=True)


def running_jobs() -> list[RunningJob]:
    """Return the jobs of this user whose chief is alive; files of dead ones are removed."""
    jobs = []
    for path in sorted(_directory().glob("*.json")):
        try:
            fields = json.loads(path.read_text())
            job = RunningJob(int(fields["pid"]), str(fields["job"]), tuple(fields["ps"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written, or removed this moment
        if psutil.pid_exists(job.pid):
            jobs.append(job)
        else:
            path.unlink(missing_ok=True)
    return jobs


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; expected room for a small file; make "
            "some, or set TMPDIR"
        ) from None


def _directory() -> Path:
    """Return this user's directory of run files, made private.

    Raises:
        ConfigError: it cannot be made, or somebody else has made it.
    """
    path = Path(tempfile.gettempdir()) / f"zmqtrain-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made: {error.strerror}; expected a directory; remove what is there, "
            "or set TMPDIR"
        ) from None
    if path.lstat().st_uid != os.getuid() or path.is_symlink():
        raise ConfigError(f"{path} belongs to somebody else: remove it, or set TMPDIR")
    return path
