"""One job at a time saves into a logdir."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from zmqtrain.errors import OccupiedError
from zmqtrain.store.checkpoint import checkpoints_directory

LOCK_FILE = "LOCK"

log = logging.getLogger(__name__)


@contextmanager
def claimed(logdir: str | None) -> Iterator[None]:
    """Keep other jobs from saving into ``logdir`` for as long as the block lasts.

    Two of them would go on from each other's checkpoints, and delete them. On a file system
    without locks nothing keeps them from it. That nothing can be written is for others to tell.

    Raises:
        OccupiedError: another job's chief runs there.
    """
    file = _open(checkpoints_directory(Path(logdir))) if logdir else None
    if file is None:
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise OccupiedError(
                f"{logdir} is the logdir of a job that runs already ({file.read().strip()}); stop "
                "that one first, or choose another --logdir"
            ) from None
        except OSError as error:
            log.info("%s: another job is not kept from saving there: %s", logdir, error)
        with suppress(OSError):  # the lock holds all the same
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # processes forked meanwhile would keep it


def _open(root: Path) -> TextIO | None:
    with suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    for mode in ("a+", "r"):  # another user's can be locked as well
        with suppress(OSError):
            return (root / LOCK_FILE).open(mode)
    return None
