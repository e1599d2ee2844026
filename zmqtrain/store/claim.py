"""One job at a time saves into a logdir."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
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
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _open(root: Path) -> TextIO | None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        return (root / LOCK_FILE).open("a+")
    except OSError:
        return None
