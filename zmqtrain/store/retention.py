"""Which checkpoints there are, which one to resume from, which ones to delete."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.store.checkpoint import checkpoints_directory
from zmqtrain.store.durable import deleting, discard, reading
from zmqtrain.store.manifest import Manifest, read_manifest, verify, verify_sizes

# A name with ".replaced-" is left when a commit dies while it takes the place of an older
# checkpoint of the same step.
_COMMITTED = re.compile(r"step-(\d{8,})(\.replaced-[0-9a-f]{8})?")
_LITTER = re.compile(
    r"(step-\d{8,}|LATEST|EPOCH)(\.replaced-[0-9a-f]{8})?\.(tmp|trash)-[0-9a-f]{8}"
)


def checkpoints(logdir: Path) -> list[Path]:
    """Return the checkpoint directories of a job, newest first, valid or not.

    A later generation is newer whatever its steps: a job that went back to an older checkpoint
    goes on from there. One whose manifest cannot be read counts as of the latest generation.

    Raises:
        CheckpointError: the directory exists and cannot be listed.
    """
    found = {path: name for path in _entries(logdir) if (name := _COMMITTED.fullmatch(path.name))}
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


def newest_valid(
    logdir: Path, on_damaged: Callable[[Path, CheckpointError], None]
) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint whose every byte is as written; None if there never was one.

    ``on_damaged`` is called with each newer one that had to be passed over, and why.

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


def prune(logdir: Path, keep: int) -> None:
    """Delete what is older than the ``keep`` newest complete checkpoints, and abandoned attempts.

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
            with deleting(path):
                discard(path)
    for path in _entries(logdir):
        if _LITTER.fullmatch(path.name):
            with deleting(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _entries(logdir: Path) -> list[Path]:
    root = checkpoints_directory(logdir)
    with reading(root):
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
