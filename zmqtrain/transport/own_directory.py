"""Directories and keys of this user alone: another user with access could replace files."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from zmqtrain.errors import ConfigError, ZmqTrainError
from zmqtrain.hints import explaining, no_temporary_directory

OTHERS_WRITE = 0o022
OTHERS_READ_OR_WRITE = 0o027  # a group may read, as in the secret volume of a pod


def make(directory: Path, remedy: str, kind: type[ZmqTrainError] = ConfigError) -> None:
    """Make a directory, or check that it is ours; missing parents become private, too.

    Raises:
        ZmqTrainError: of this ``kind``; it cannot be made, or :func:`check` raises it.
    """
    with explaining(f"{directory} cannot be made", remedy, kind):
        make_private(directory)
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
    with explaining(f"{directory} cannot be read", remedy, kind):
        found = directory.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise kind(f"{directory} is not a directory, or is a link or another user's; {remedy}")
    if found.st_mode & 0o077:
        is_shared = found.st_mode & OTHERS_WRITE  # other users need it
        own = directory / f"zmqtrain-{os.geteuid()}"
        raise kind(
            f"{directory} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"expected mode 0700; {f'name one of your own, {own}' if is_shared else 'chmod 700 it'}"
        )


def refuse_open(path: Path, mask: int, mode: str) -> None:
    """Refuse a file or directory of keys that is open to others.

    A read-only file system may let others write: they cannot.

    Raises:
        ConfigError: others have one of the rights in ``mask``; ``mode``: the mode to set.
        OSError: it cannot be read.
    """
    found = stat.S_IMODE(path.stat().st_mode) & mask
    if found & OTHERS_WRITE and os.statvfs(path).f_flag & os.ST_RDONLY:
        found &= ~OTHERS_WRITE
    if found:
        is_shared = path.is_dir() and found & OTHERS_WRITE  # other users need it
        remedy = "use a directory of your own" if is_shared else f"chmod {mode} it"
        raise ConfigError(
            f"{path} is open to others (mode {stat.S_IMODE(path.stat().st_mode):04o}), who could "
            f"take part in the job; expected mode 0{mode}; {remedy}, and replace its keys if "
            "others may have been there"
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
