"""Small files by which `zmqtrain status` finds a job on this host.

Both the chief and ps 0 write one, so that the job is found while the chief is away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from zmqtrain.config.cluster import Role, Task, connect_endpoint
from zmqtrain.config.restarts import Restart
from zmqtrain.errors import ConfigError, ExitCode, ZmqTrainError
from zmqtrain.files import read_file, replace_file
from zmqtrain.hints import explaining
from zmqtrain.transport.own_directory import for_small_files

NOTE_S = 3600.0
"""Age of a note of a job's end that no task reads any more."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose chief, or whose ps 0, is the process ``pid`` of this host."""

    pid: int
    job: str
    ps: tuple[str, ...]
    task: str
    metrics: str = ""  # address at which it serves them
    logdir: str = ""  # absolute
    began: float = 0.0  # Unix time
    spent: Mapping[str, float] = field(default_factory=dict)
    """Tasks without a restart left, each with the Unix time until which it has none."""


@contextlib.contextmanager
def published(
    job: str, ps: tuple[str, ...], task: str, metrics: str = "", logdir: str | None = None
) -> Iterator[Callable[[str, Restart], None]]:
    """Write the file of this process, and remove it at the end of the block.

    Yields a function to be called with each task that is restarted.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = for_small_files() / f"{os.getpid()}.json"
    _files(path.parent)  # removes the file of a killed task
    try:
        logdir = os.path.abspath(logdir) if logdir else ""
        spent: dict[str, float] = {}
        own = RunningJob(os.getpid(), job, ps, task, metrics, logdir, time.time(), spent)
        _write(path, json.dumps(asdict(own)))

        def note(task: str, restart: Restart) -> None:
            if not restart.left:
                spent[task] = time.time() + restart.regained_s
                with contextlib.suppress(ConfigError):  # a full disk ends no training
                    _write(path, json.dumps(asdict(own)))

        yield note
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

    A task that is restarted after the end reads it with `end_since`.

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


def forget_end(ps: tuple[str, ...]) -> None:
    """Remove the note of an end: another job of these ps begins."""
    with contextlib.suppress(OSError, ConfigError):
        _end_file(ps).unlink(missing_ok=True)


@contextlib.contextmanager
def life(ps: tuple[str, ...], task: Task) -> Iterator[float | None]:
    """Record that this process is a task; yield the Unix time at which the task's first life began.

    None: no earlier life was killed or lost its peers. A life that ends otherwise removes the
    record, so the next one is the first of another job.
    """
    path = for_small_files() / f"{_name(ps)}-{task.hyphenated}.life"
    before = _read_life(path)
    if before is not None and before.is_alive:
        yield None  # two processes are this task, and one of them will be refused
        return
    since = None if before is None else before.since
    own = _Life(os.getpid(), psutil.Process().create_time(), since or time.time())
    with contextlib.suppress(ConfigError):  # then it is not known to have been killed
        _write(path, json.dumps(asdict(own)))
    is_lost = False
    try:
        yield since
    except ZmqTrainError as error:
        is_lost = error.exit_code == ExitCode.PEER_LOST
        raise
    finally:
        if not is_lost:
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Life:
    """A process that is a task; ``since``: when the first of its lives in a row began."""

    pid: int
    created: float
    since: float

    @property
    def is_alive(self) -> bool:
        """Whether another process is this life still."""
        try:
            created = psutil.Process(self.pid).create_time()
        except psutil.Error:
            return False
        return self.pid != os.getpid() and created == self.created


def _read_life(path: Path) -> _Life | None:
    try:
        return _Life(**json.loads(read_file(path)))
    except (OSError, ValueError, TypeError):
        return None


def old_notes() -> list[Path]:
    """Return the notes that no task will read any more: those older than an hour."""
    limit = time.time() - NOTE_S
    lives = {path: _read_life(path) for path in for_small_files().glob("*.life")}
    dead = [path for path, life in lives.items() if life is None or not life.is_alive]
    notes = [*for_small_files().glob("*.ended"), *dead]
    return [path for path in notes if path.stat().st_mtime < limit]


def _end_file(ps: tuple[str, ...]) -> Path:
    return for_small_files() / f"{_name(ps)}.ended"


def _name(ps: tuple[str, ...]) -> str:
    return hashlib.blake2b(",".join(ps).encode(), digest_size=8).hexdigest()


def _files(directory: Path) -> list[Path]:
    """Return the files of live processes, which are named by pid; remove the others."""
    files = sorted(directory.glob("*.json"))
    living = [path for path in files if path.stem.isdecimal() and psutil.pid_exists(int(path.stem))]
    for path in set(files).difference(living):
        path.unlink(missing_ok=True)
    return living


def _write(path: Path, text: str) -> None:
    """Write a whole file, even if several tasks of a job note its end at once."""
    remedy = "expected room for a small file; free some space, or set TMPDIR"
    with explaining(f"{path} cannot be written", remedy):
        replace_file(path, text.encode())
