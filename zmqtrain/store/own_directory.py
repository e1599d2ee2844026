"""A directory of this user alone: another who can write to it could replace our segments."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from zmqtrain.errors import SegmentError

REMEDY = (
    "expected a directory that this user can write; correct --segment-dir (or ZMQTRAIN_SEGMENT_DIR)"
)


def make(directory: Path) -> None:
    """Make a directory and its parents, or check that it is ours.

    Raises:
        SegmentError: it cannot be made, or :func:`check` raises it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check(directory)
    except OSError as error:
        raise SegmentError(f"{directory} cannot be made: {error.strerror}; {REMEDY}") from error


def check(directory: Path) -> None:
    """Check that a directory is ours alone.

    Raises:
        SegmentError: it is none, a link, another user's, or open to others.
        OSError: there is none.
    """
    found = directory.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SegmentError(f"{directory} is no directory, a link, or another user's; {REMEDY}")
    if found.st_mode & 0o077:
        is_shared = found.st_mode & 0o022  # others write there, too: leave it to them
        own = directory / f"zmqtrain-{os.geteuid()}"
        raise SegmentError(
            f"{directory} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"expected mode 0700; {f'name one of your own, {own}' if is_shared else 'chmod 700 it'}"
        )
