"""The currently allowed keys, from a registry that is read whenever it changes."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from zmqtrain.hints import explaining
from zmqtrain.transport.keys import REGISTRY, Entry, Owner, read_registry

log = logging.getLogger(__name__)


class KnownPeer(bytes):
    """An authenticated peer, with its key."""

    key: Key


@dataclass(slots=True, eq=False)
class Key:
    """An allowed key; ``allowed`` turns False for good once it is revoked."""

    owner: Owner
    public: str
    allowed: bool = True
    _last: KnownPeer = field(default_factory=KnownPeer)

    def peer(self, name: bytes) -> KnownPeer:
        """Return the holder's peer on the connection of this name."""
        last = self._last
        if last != name:
            last = self._last = KnownPeer(name)
            last.key = self
        return last


class Registry:
    """Allowed keys by their public halves."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError if the registry cannot be read."""
        self._path = directory / REGISTRY
        self._version: tuple[int, ...] = ()  # of the file when it was read
        self._keys: dict[str, Key] = {}
        self._revoked: dict[str, Owner] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the registry again if it has changed.

        Raises:
            ConfigError: it cannot be read; the allowed keys stay as they are.
        """
        remedy = "expected the registry of the job's keys; bring it back"
        with explaining(f"{self._path} cannot be read", remedy):
            found = os.stat(self._path)
        version = (found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode)
        if version != self._version:
            self._replace(read_registry(self._path.parent))
            self._version = version

    def find(self, public: str) -> Key | None:
        return self._keys.get(public)

    def describe(self, public: str) -> str:
        owner = self._revoked.get(public)
        return "a key that is not known" if owner is None else f"the revoked key of {owner}"

    def _replace(self, entries: tuple[Entry, ...]) -> None:
        allowed = {entry.public: entry.owner for entry in entries if not entry.revoked}
        self._revoked = {entry.public: entry.owner for entry in entries if entry.revoked}
        for public, key in list(self._keys.items()):
            if allowed.get(public) != key.owner:
                key.allowed = False
                del self._keys[public]
                log.warning("the key of %s is no longer allowed", key.owner)
        for public, owner in allowed.items():
            if public not in self._keys:
                self._keys[public] = Key(owner, public)
