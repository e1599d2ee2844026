"""The content of a job's logdir: its checkpoints, the number of its last generation, and a lock.

Which checkpoints there are, which one to resume from, which ones to delete. A job that goes back
twice to one checkpoint must not use a generation's number twice: its workers could not distinguish
the two. One job at a time saves there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from zmqtrain.errors import CheckpointError, ConfigError, OccupiedError
from zmqtrain.files import IrregularFileError, open_file, read_file, replace_file
from zmqtrain.store import durable
from zmqtrain.store.checkpoint import COMMITTED, checkpoints_directory
from zmqtrain.store.manifest import Manifest, read_manifest, verify, verify_sizes

GENERATION_FILE = "EPOCH"  # as checkpoints of version 0.1 have it
HISTORY_FILE = "history.json"  # beside the checkpoints' directory
LOCK_FILE = "LOCK"
GROUP_FILE = "GROUP"
CHECKS, CHECK_S = 100, 0.005  # within which other processes have checked the lock

_GROUP = re.compile(rf"{GROUP_FILE}-(\d{{1,9}})")
_NUMBER = re.compile(rb"\d{1,18}\s*")
_LITTER = re.compile(
    r"(step-\d{8,}|LATEST|EPOCH)(\.replaced-[0-9a-f]{8})?\.(tmp|trash)-[0-9a-f]{8}"
)

log = logging.getLogger(__name__)


def checkpoints(logdir: Path) -> list[Path]:
    """Return the checkpoint directories of a job, newest first, valid or not.

    A later generation is newer whatever its steps: a job that went back to an older checkpoint
    goes on from there. One whose manifest cannot be read counts as of the latest generation.

    Raises:
        CheckpointError: the directory exists and cannot be listed.
    """
    found = {path: name for path in _entries(logdir) if (name := COMMITTED.fullmatch(path.name))}
    generations = {path: _generation(path) for path in found}
    latest = max(
        (generation for generation in generations.values() if generation is not None), default=0
    )

    def age(path: Path) -> tuple[int, int, bool]:
        generation = generations[path]
        return (
            latest if generation is None else generation,
            int(found[path][1]),
            found[path][2] is None,
        )

    return sorted(found, key=age, reverse=True)


def latest_generation(logdir: Path) -> int:
    """Return the latest generation of a checkpoint; 0 if there is none that can be read."""
    return max((_generation(path) or 0 for path in checkpoints(logdir)), default=0)


def newest_valid(
    logdir: Path, on_damaged: Callable[[Path, CheckpointError], None]
) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint whose every byte is as written; None if there never was one.

    ``on_damaged`` is called with each newer one that was skipped, and why.

    Raises:
        CheckpointError: there are checkpoints but none is valid. Training afresh would then
            overwrite what may still be rescued, so that is left to the user.
    """
    found = checkpoints(logdir)
    for path in found:
        try:
            manifest = read_manifest(path)
            verify(path, manifest)
        except CheckpointError as error:
            on_damaged(path, error)
        else:
            return path, manifest
    if found:
        raise CheckpointError(
            f"{checkpoints_directory(logdir)}: none of its {len(found)} checkpoints is valid; "
            "expected at least one; bring one back, or train in a new logdir"
        )
    return None


def valid_at(logdir: Path, step: int) -> tuple[Path, Manifest]:
    """Return the checkpoint of a step, whose every byte is as written.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = checkpoints(logdir)
    for path in found:
        if step_of(path) == step:
            manifest = read_manifest(path)
            verify(path, manifest)
            return path, manifest
    steps = ", ".join(str(step_of(path)) for path in found) or "none"
    raise CheckpointError(
        f"{checkpoints_directory(logdir)}: there is no checkpoint of step {step}; expected one of "
        f"its steps: {steps}"
    )


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's directory, as its name says."""
    name = COMMITTED.fullmatch(path.name)
    return int(name[1]) if name else -1


def prune(logdir: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest complete checkpoints, and abandoned attempts.

    Complete means a readable manifest and files of the right sizes; a damaged one does not count,
    and is deleted only once ``keep`` complete ones are newer. No attempt may be under way.

    Raises:
        ConfigError: ``keep`` is less than 1.
        CheckpointError: something cannot be deleted; nothing that should stay is gone.
    """
    if keep < 1:
        raise ConfigError(f"keep is {keep}; expected to keep at least 1 checkpoint")
    kept = 0
    for path in checkpoints(logdir):
        if kept < keep:
            kept += _is_complete(path)
        else:
            with durable.deleting(path):
                durable.discard(path)
    for path in _entries(logdir):
        if _LITTER.fullmatch(path.name):
            with durable.deleting(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def last_generation(root: Path) -> int:
    """Return the number noted in the directory of a job's checkpoints; 0 if there is none.

    Raises:
        CheckpointError: the file cannot be read, or holds no number.
    """
    file = root / GENERATION_FILE
    with durable.reading(file):
        try:
            content = read_file(file)
        except FileNotFoundError:
            return 0
    if not _NUMBER.fullmatch(content):
        raise CheckpointError(
            f"{file}: it holds {content[:20]!r}; expected the number of the job's last generation; "
            "delete the file, and start all tasks of the job again"
        )
    return int(content)


def note_generation(root: Path, generation: int) -> None:
    """Make durable that a generation of this number begins.

    Raises:
        CheckpointError: the file cannot be written.
    """
    file = root / GENERATION_FILE
    with durable.writing(file):
        root.mkdir(parents=True, exist_ok=True)
        replace_file(file, f"{generation}\n".encode())
        durable.sync_path(root)


def newest_group(logdir: str) -> tuple[int, tuple[str, ...]]:
    """Return the last group of workers that was written, by number and addresses; 0 and none.

    Raises:
        CheckpointError: it cannot be read.
    """
    root = checkpoints_directory(Path(logdir))
    numbers = [_GROUP.fullmatch(path.name) for path in _entries(Path(logdir))]
    last = max((int(number[1]) for number in numbers if number), default=0)
    file = root / f"{GROUP_FILE}-{last}"
    with durable.reading(file), suppress(FileNotFoundError):
        return last, tuple(read_file(file).decode().split())
    return 0, ()


def write_group(logdir: str, number: int, addresses: Sequence[str]) -> None:
    """Write the group of workers of this number, unless there is one.

    Raises:
        CheckpointError: it cannot be written.
    """
    file = checkpoints_directory(Path(logdir)) / f"{GROUP_FILE}-{number}"
    own = file.with_name(f"{file.name}.tmp-{durable.new_token()}")
    with durable.writing(file):
        own.write_text("\n".join(addresses))
        with suppress(FileExistsError):
            os.link(own, file)  # whole, and of one writer
        own.unlink()


def forget_groups(logdir: str) -> None:
    """Delete the files of groups: the job has ended.

    Raises:
        CheckpointError: one cannot be deleted.
    """
    for path in _entries(Path(logdir)):
        if _GROUP.match(path.name):
            with durable.deleting(path):
                path.unlink()


@contextmanager
def claimed(logdir: str | None) -> Iterator[None]:
    """Keep other jobs from saving into ``logdir`` for as long as the block lasts.

    Two of them would go on from each other's checkpoints, and delete them. On a file system
    without locks nothing prevents that. A directory that cannot be written raises elsewhere.

    Raises:
        OccupiedError: another job's chief runs there.
        CheckpointError: the lock is not a regular file.
    """
    descriptor = _open_lock(checkpoints_directory(Path(logdir))) if logdir else None
    if descriptor is None:
        yield
        return
    try:
        try:
            _lock(descriptor)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise OccupiedError(
                f"{logdir} is the logdir of a job that runs already ({holder}); stop that one "
                "first, or choose another --logdir"
            ) from None
        except OSError as error:
            log.info("%s cannot be locked; another job could save there: %s", logdir, error)
        with suppress(OSError):  # the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # processes forked meanwhile would keep it
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Take the lock, which :func:`is_claim_seen` may check. BlockingIOError: another has it."""
    for _ in range(CHECKS):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(CHECK_S)
    raise BlockingIOError


def is_claim_seen(directory: str) -> bool:
    """Return whether this process sees that the logdir is claimed; locks may reach no other host.

    ``directory``: one that the chief has made there; "" if the job has no logdir, which is fine.
    """
    if not directory:
        return True
    descriptor = _open_lock(Path(directory).parent)
    if descriptor is None:
        return False
    try:
        # Shared: two processes that check at the same time must not see each other as the chief.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # processes forked meanwhile would keep it
    except OSError as error:
        return isinstance(error, BlockingIOError)  # else there are no locks
    finally:
        os.close(descriptor)
    return False


def _entries(logdir: Path) -> list[Path]:
    root = checkpoints_directory(logdir)
    with durable.reading(root):
        try:
            return sorted(root.iterdir())
        except FileNotFoundError:
            return []


def _generation(path: Path) -> int | None:
    try:
        return read_manifest(path).generation
    except CheckpointError:
        return None


def _is_complete(path: Path) -> bool:
    try:
        verify_sizes(path, read_manifest(path))
    except CheckpointError:
        return False
    return True


def _open_lock(root: Path) -> int | None:
    with suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    file = root / LOCK_FILE
    for mode in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # another user's can be locked as well
        try:
            return open_file(file, mode)
        except IrregularFileError as error:
            raise CheckpointError(f"{file}: {error.strerror}; remove it, and start again") from None
        except OSError:
            continue
    return None
