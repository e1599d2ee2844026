"""The number of a job's last generation, kept beside its checkpoints.

A job that goes back twice to one checkpoint must not use a number twice: its workers would take the
second time for the first.
"""

from __future__ import annotations

import re
from pathlib import Path

from zmqtrain.errors import CheckpointError
from zmqtrain.store.durable import reading, replace_file, sync_path, writing

GENERATION_FILE = "EPOCH"  # as checkpoints of version 0.1 have it

_NUMBER = re.compile(rb"\d{1,18}\s*")


def last_generation(root: Path) -> int:
    """Return the number noted in the directory of a job's checkpoints; 0 if there is none.

    Raises:
        CheckpointError: the file cannot be read, or holds no number.
    """
    file = root / GENERATION_FILE
    with reading(file):
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return 0
    if not _NUMBER.fullmatch(content):
        raise CheckpointError(
            f"{file}: it holds {content[:20]!r}; expected the number of the job's last generation; "
            "delete the file, and have all tasks of the job start anew"
        )
    return int(content)


def note_generation(root: Path, generation: int) -> None:
    """Make durable that a generation of this number begins.

    Raises:
        CheckpointError: the file cannot be written.
    """
    file = root / GENERATION_FILE
    with writing(file):
        root.mkdir(parents=True, exist_ok=True)
        replace_file(file, f"{generation}\n".encode())
        sync_path(root)
