"""Directories of this user alone: another user with write access could replace their files."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from zmqtrain.errors import ConfigError, ZmqTrainError, no_temporary_directory


def make(directory: Path, remedy: str, kind: type[ZmqTrainError] = ConfigError) -> None:
    """Make a directory, or check that it is ours; missing parents become private, too.

    Raises:
        ZmqTrainError: of this ``kind``; it cannot be made, or :func:`check` raises it.
    """
    try:
        make_private(directory)
    except OSError as error:
        raise kind(f"{directory} cannot be made: {error.strerror}; {remedy}") from error
    check(directory, remedy, kind)


def make_private(directory: Path) -> None:
    """Make a directory and its missing parents, each with mode 0700 whatever the umask is."""
    for parent in reversed((directory, *directory.parents)):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(exist_ok=True)  # the path may be a file


def check(directory: Path, remedy: str, kind: type[ZmqTrainError] = ConfigError) -> None:
    """Check that a directory is ours alone.

    Raises:
        ZmqTrainError: of this ``kind``; it is not a directory, a link, another user's, or open.
    """
    try:
        found = directory.stat(follow_symlinks=False)
    except OSError as error:
        raise kind(f"{directory} cannot be read: {error.strerror}; {remedy}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise kind(f"{directory} is no directory, a link, or another user's; {remedy}")
    if found.st_mode & 0o077:
        is_shared = found.st_mode & 0o022  # other users need it
        own = directory / f"zmqtrain-{os.geteuid()}"
        raise kind(
            f"{directory} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"expected mode 0700; {f'name one of your own, {own}' if is_shared else 'chmod 700 it'}"
        )


def for_small_files() -> Path:
    """Return this user's directory below TMPDIR; make it if it is missing.

    Raises:
        ConfigError: it cannot be made, or is not ours alone.
    """
    remedy = "expected a directory of this user; remove what is there, or set TMPDIR"
    try:
        path = Path(tempfile.gettempdir()) / f"zmqtrain-{os.geteuid()}"
    except FileNotFoundError as error:
        raise no_temporary_directory(error) or error from None
    make(path, remedy)
    return path
