"""The directory of keys: the registry of a job's keys, and the secrets of this host's tasks.

It holds ``registry``, a line for each key ever made (task, state, public key), and
``ROLE-INDEX.secret`` for the tasks that run on this host. A host needs the registry and only the
secrets of its own tasks. Keys are 32 bytes of Curve25519, written as 64 hexadecimal digits.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from zmqtrain.errors import ConfigError, OccupiedError
from zmqtrain.files import read_file, replace_file, write_file
from zmqtrain.transport.own_directory import (
    OTHERS_READ_OR_WRITE,
    OTHERS_WRITE,
    make_private,
    refuse_open,
)

REGISTRY = "registry"
ROLES = ("ps", "chief", "worker", "client")
"""Roles that have keys; a client is a person who queries or controls a running job."""

ALLOWED, EXPIRING, REVOKED = "allowed", "expiring", "revoked"
"""States of a key. An expiring key is admitted until all tasks have its successor."""

MAX_INDEX = 999_999_999
_STAGED = ".next"  # suffix of a secret that is not in use until the registry has its key
_KEY = re.compile(r"[0-9a-f]{64}")
_SECRET = re.compile(rf"({'|'.join(ROLES)})-(\d{{1,9}})\.secret")
_LINE = re.compile(
    rf"({'|'.join(ROLES)}) +(\d{{1,9}}) +({ALLOWED}|{EXPIRING}|{REVOKED}) +([0-9a-f]{{64}}) *",
    re.ASCII,
)
_HEADING = "# task, state and public key; changed by zmqtrain keys, read again when it changes\n"


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    role: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True)
class Entry:
    owner: Owner
    public: str
    state: str = ALLOWED

    @property
    def revoked(self) -> bool:
        return self.state == REVOKED

    def __str__(self) -> str:
        return f"{self.owner} {self.state} {self.public}"


class Pair(NamedTuple):
    """A key: its public half, and the secret one unless it is on another host."""

    public: str
    secret: str | None


def owner_of(role: str, index: int | None) -> Owner:
    """Return the owner with this role and index; only the chief needs no index.

    Raises:
        ConfigError: there is no such task, or the index is missing.
    """
    if role not in ROLES:
        raise ConfigError(f"{role!r} is not a role with keys; expected one of {', '.join(ROLES)}")
    if index is None:
        if role != "chief":
            raise ConfigError(
                f"the index of the {role} is missing; expected one, as in {role} 2; add it"
            )
        index = 0
    most = 0 if role == "chief" else MAX_INDEX
    if not 0 <= index <= most:
        expected = f"a number from 0 to {most}" if most else "0, since there is one chief"
        raise ConfigError(f"the index of a {role} is {index}; expected {expected}")
    return Owner(role, index)


def public_key(text: str) -> str:
    """Return a public key in the registry's form.

    Raises:
        ConfigError: the text is not a public key.
    """
    key = text.strip().lower()
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"the public key {text!r:.80} is not 64 hexadecimal digits; copy it from the output of "
            "zmqtrain keys add"
        )
    return key


def read_registry(directory: Path) -> tuple[Entry, ...]:
    """Return all keys of the registry, in its order.

    Raises:
        ConfigError: it is missing, unreadable, writable by others, or contradicts itself.
    """
    path = directory / REGISTRY
    with _readable(f"{path}", "zmqtrain keys new"):
        refuse_open(directory, OTHERS_WRITE, "700")
        refuse_open(path, OTHERS_WRITE, "600")
        lines = read_file(path).decode("ascii").splitlines()
    return parse_registry(lines, path)


def parse_registry(lines: Iterable[str], path: Path) -> tuple[Entry, ...]:
    """Return the entries in the lines of a registry; ``path`` is for errors. Pure."""
    entries = []
    for number, line in enumerate(lines, 1):
        if entry := _LINE.fullmatch(line):
            role, index, state, public = entry.groups()
            entries.append(Entry(Owner(role, int(index)), public, state))
        elif line and not line.startswith("#"):
            raise ConfigError(
                f"{path}, line {number}: {line!r:.120}; expected role, index, {ALLOWED}, "
                f"{EXPIRING} or {REVOKED}, and a public key of 64 hexadecimal digits; correct the "
                "line, or remove it"
            )
    _check_registry(entries, path)
    return tuple(entries)


def allowed_key(directory: Path, owner: Owner) -> bytes:
    """Return the public key that a task may use now.

    Raises:
        ConfigError: it has none, or the registry cannot be read.
    """
    for entry in read_registry(directory):
        if entry.owner == owner and entry.state == ALLOWED:
            return bytes.fromhex(entry.public)
    raise ConfigError(
        f"{directory / REGISTRY} allows no key of {owner}; expected one; add it by zmqtrain keys "
        f"add {owner}, or copy the registry of the job here"
    )


def read_secret(directory: Path, owner: Owner) -> bytes:
    """Return the secret key of a task of this host.

    Raises:
        ConfigError: it is missing, is not a key, or is readable by others.
    """
    path = secret_path(directory, owner)
    with _readable(f"{path}, the secret key of {owner},", f"zmqtrain keys add {owner}"):
        refuse_open(path, OTHERS_READ_OR_WRITE, "600")
        text = read_file(path).decode("ascii").strip()
    if not _KEY.fullmatch(text):
        raise ConfigError(f"{path} holds no secret key, which is 64 hexadecimal digits; revoke it")
    return bytes.fromhex(text)


def secret_path(directory: Path, owner: Owner) -> Path:
    return directory / secret_name(owner)


def secret_name(owner: Owner) -> str:
    return f"{owner.role}-{owner.index}.secret"


def secrets_in(directory: Path) -> list[Owner]:
    """Return the owners of the secret keys in this directory; none if it does not exist."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    found = [_SECRET.fullmatch(name) for name in names]
    return sorted(Owner(match[1], int(match[2])) for match in found if match)


def key_files(directory: Path) -> dict[str, str]:
    """Return the text of the registry and of each secret here, by file name.

    Raises:
        ConfigError: one cannot be read.
    """
    names = (REGISTRY, *map(secret_name, secrets_in(directory)))
    try:
        return {name: read_file(directory / name).decode() for name in names}
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}; expected keys of this user, made "
            "by zmqtrain keys new"
        ) from None


def add_keys(directory: Path, pairs: Mapping[Owner, Pair]) -> None:
    """Add all new keys or none; make the directory if it is missing.

    Raises:
        ConfigError: a task has a key already, a key has a task, or the directory cannot be written
            or is open to others.
    """
    with ExitStack() as failed:
        with _changing(directory, make=True) as entries:
            entries += [Entry(owner, pair.public) for owner, pair in pairs.items()]
            _check_registry(entries, directory / REGISTRY)
            for owner, pair in pairs.items():
                if pair.secret is not None:
                    path = secret_path(directory, owner)
                    write_file(path, f"{pair.secret}\n".encode(), 0o600)
                    failed.callback(path.unlink)
        failed.pop_all()


@contextmanager
def rotation(directory: Path, pairs: Callable[[], Mapping[Owner, Pair]]) -> Iterator[list[Owner]]:
    """Replace keys in two phases: the former keys expire in the block, and are revoked after it.

    Yields the owners. The block must copy the registry and the secrets to all tasks, which then
    admit both keys of an owner. ``pairs`` makes new keys, unless a rotation was interrupted.

    Raises:
        ConfigError: the directory cannot be written.
        OccupiedError: another rotation of these keys is under way.
    """
    with _only_rotation(directory):
        if not expiring(read_registry(directory)):
            _stage(directory, pairs())
        _take_staged(directory, people=False)
        yield expiring(read_registry(directory))
        _take_staged(directory, people=True)  # every ps knows their new keys by now
        with _changing(directory) as entries:
            entries[:] = concluded(entries)


def rotated(entries: Iterable[Entry], publics: Mapping[Owner, str]) -> list[Entry]:
    """Return the registry in which the keys of tasks expire, and others are allowed. Pure."""
    former = [
        replace(entry, state=EXPIRING)
        if entry.owner in publics and entry.state == ALLOWED
        else entry
        for entry in entries
    ]
    return former + [Entry(owner, public) for owner, public in publics.items()]


def concluded(entries: Iterable[Entry]) -> list[Entry]:
    """Return the registry in which the expiring keys are revoked. Pure."""
    return [replace(each, state=REVOKED) if each.state == EXPIRING else each for each in entries]


def expiring(entries: Iterable[Entry]) -> list[Owner]:
    return [entry.owner for entry in entries if entry.state == EXPIRING]


def is_new(entries: Sequence[Entry], public: str) -> bool:
    """Return whether a key has replaced another one; some hosts may not know it yet. Pure."""
    owners = [each.owner for each in entries if each.public == public and each.state == ALLOWED]
    return sum(entry.owner in owners for entry in entries) > 1


def revoke_key(directory: Path, owner: Owner) -> str:
    """Revoke the keys of a task and remove its secret if it is here; return the public key.

    Raises:
        ConfigError: the task has no key, or the directory cannot be written.
    """
    with _changing(directory) as entries:
        held = [entry for entry in entries if entry.owner == owner and not entry.revoked]
        if not held:
            raise ConfigError(
                f"{directory} has no allowed key of {owner}; expected a task from the output of "
                "zmqtrain keys list"
            )
        entries[:] = [
            replace(entry, state=REVOKED) if entry.owner == owner else entry for entry in entries
        ]
    secret_path(directory, owner).unlink(missing_ok=True)
    _staged_path(directory, owner).unlink(missing_ok=True)
    return held[-1].public


@contextmanager
def _only_rotation(directory: Path) -> Iterator[None]:
    with _writing(directory):
        descriptor = os.open(directory / ".rotation", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise OccupiedError(
            f"another rotation of the keys in {directory} is under way; expected one at a time; "
            "wait until it has ended"
        ) from None
    finally:
        os.close(descriptor)


def _stage(directory: Path, pairs: Mapping[Owner, Pair]) -> None:
    """Store new secrets beside the present ones, then let the present keys expire.

    In this order a kill loses nothing: staged secrets are in use once the registry has their keys.
    """
    with _changing(directory) as entries:
        for path in directory.glob(f"*{_STAGED}"):
            path.unlink()
        for owner, pair in pairs.items():
            write_file(_staged_path(directory, owner), f"{pair.secret}\n".encode(), 0o600)
        entries[:] = rotated(entries, {owner: pair.public for owner, pair in pairs.items()})


def _take_staged(directory: Path, *, people: bool) -> None:
    """Put the staged secrets of tasks, or those of people, in place."""
    with _writing(directory):
        for path in directory.glob(f"*{_STAGED}"):
            if path.name.startswith("client-") is people:
                os.replace(path, path.with_suffix(""))


def _staged_path(directory: Path, owner: Owner) -> Path:
    return directory / f"{secret_name(owner)}{_STAGED}"


@contextmanager
def _changing(directory: Path, *, make: bool = False) -> Iterator[list[Entry]]:
    """Yield the registry's entries under a lock; write them back afterwards."""
    with _writing(directory):
        if make:
            make_private(directory)
            refuse_open(directory, OTHERS_WRITE, "700")
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            path = directory / REGISTRY
            entries = list(read_registry(directory)) if path.exists() else []
            yield entries
            text = _HEADING + "".join(f"{entry}\n" for entry in entries)
            replace_file(path, text.encode(), 0o600)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or directory}: {error.strerror or error}; expected a directory of "
            "keys that this user can write; correct --keys (or ZMQTRAIN_KEYS)"
        ) from None


@contextmanager
def _readable(what: str, made_by: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{what} cannot be read: {getattr(error, 'strerror', None) or error}; make it by "
            f"{made_by}, or copy it here from where it was made"
        ) from None


def _check_registry(entries: Iterable[Entry], path: Path) -> None:
    publics: dict[str, Owner] = {}
    allowed: set[Owner] = set()
    for entry in entries:
        if entry.public in publics:
            raise ConfigError(
                f"{path}: one key for {publics[entry.public]} and {entry.owner}; expected a key "
                "of its own for each; leave one out, or make another by zmqtrain keys add"
            )
        if entry.state == ALLOWED and entry.owner in allowed:
            raise ConfigError(
                f"{path}: two keys of {entry.owner}; expected one; revoke the other first "
                f"(zmqtrain keys revoke {entry.owner})"
            )
        publics[entry.public] = entry.owner
        allowed |= {entry.owner} if entry.state == ALLOWED else set()
