"""Directories of `zmqtrain run`: its sockets and the logs of its tasks, while it lasts."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.config.run_file import running_jobs

PREFIX = "zmqtrain-"

_CONTENT = re.compile(r"ps-\d+\.sock|(ps|worker)-\d+\.log")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A directory that a `zmqtrain run` made, and did not live to remove if it is not in use."""

    path: Path
    nbytes: int
    modified_at: float  # Unix time
    in_use: bool  # its chief is alive, or some ps listens there


def run_directories(temporary: Path) -> Iterator[RunDirectory]:
    """Yield those of this user that hold something; any that vanish meanwhile are passed over."""
    for path in sorted(temporary.glob(f"{PREFIX}*")):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            entries = {entry: entry.lstat() for entry in path.iterdir()}
        except OSError:
            continue
        # An empty one may be of a run that has not made itself known yet.
        if not entries or not all(_CONTENT.fullmatch(entry.name) for entry in entries):
            continue
        nbytes = sum(status.st_size for status in entries.values())
        yield RunDirectory(path, nbytes, found.st_mtime, _is_in_use(path, entries))


def remove_run(path: Path) -> bool:
    """Remove a run's directory, which is not in use; return whether it was removed.

    That stays so: every run makes a directory of its own.
    """
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _is_in_use(path: Path, entries: Iterable[Path]) -> bool:
    # A run makes itself known before it starts a task, so whoever has left something there is
    # either known by now or dead.
    known = {Path(address).parent.name for job in running_jobs() for address in job.ps}
    if path.name in known:
        return True
    return any(_is_listened_to(entry) for entry in entries if entry.suffix == ".sock")


def _is_listened_to(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
