"""A process's keys, and the connections that they allow."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from zmqtrain.errors import ConfigError
from zmqtrain.transport.keys import ALLOWED, Owner, allowed_key, is_new, read_registry, read_secret

_REMEDY = (
    "make keys (zmqtrain keys new --keys DIR) and give every task --keys DIR (or ZMQTRAIN_KEYS), "
    "or say --insecure (or ZMQTRAIN_INSECURE=1) on a network that you trust"
)


PATIENCE_S = 120.0
"""How long a task waits until changed keys and addresses have reached all hosts: an engine may not
have ended the former task at an address, nor updated the registry of every ps."""


@dataclass(frozen=True, slots=True)
class Security:
    """The trust in connections.

    With a directory of keys every tcp connection is encrypted and both of its ends prove who they
    are. Without one only this user's tasks on this host are trusted, unless ``insecure``, which
    trusts everyone who can connect. ``owner`` is the task that the process is, ``servers`` the task
    expected to listen at each endpoint. For ``patience_s`` a task retries where another key is
    found, unless the right one was there before, and where its own key is refused although our
    registry says that it has just been changed.
    """

    owner: Owner | None = None
    directory: Path | None = None
    insecure: bool = False
    servers: Mapping[str, Owner] = field(default_factory=dict)
    patience_s: float = 0.0

    def is_keyed(self, endpoint: str) -> bool:
        """Return whether connections there are encrypted; Unix sockets need not be."""
        return self.directory is not None and endpoint.startswith("tcp://")

    def is_by_user(self, endpoint: str) -> bool:
        """Return whether only this user can connect there, by Unix sockets."""
        return self.directory is None and not self.insecure and is_local(endpoint)

    def keys(self) -> Path:
        """Return the directory of keys.

        Raises:
            ConfigError: there is none.
        """
        if self.directory is None:
            raise ConfigError(f"keys are needed, but there are none; {_REMEDY}")
        return self.directory

    def secret(self) -> bytes:
        """Return the secret key of this process's task.

        Raises:
            ConfigError: there is none.
        """
        if self.owner is None:
            raise ConfigError("a process that is not a task of a job has no key")
        return read_secret(self.keys(), self.owner)

    def may_be_admitted(self, public: str, *, was_admitted: bool) -> bool:
        """Return whether a listener that refuses this key of ours may have an old registry.

        That is possible if our registry allows the key, and the key has replaced another one or was
        admitted before. A key that is revoked here is refused for good.
        """
        with contextlib.suppress(ConfigError):
            entries = read_registry(self.keys())
            allowed = {entry.public for entry in entries if entry.state == ALLOWED}
            return public in allowed and (was_admitted or is_new(entries, public))
        return False

    def server_key(self, endpoint: str) -> bytes:
        """Return the public key of the task that listens there.

        Raises:
            ConfigError: it is not known.
        """
        if endpoint not in self.servers:
            raise ConfigError(f"no task is known whose key is expected at {endpoint}")
        return allowed_key(self.keys(), self.servers[endpoint])

    def check(self, endpoint: str, *, listening: bool) -> None:
        """Check that a connection is protected.

        Raises:
            ConfigError: it is not.
        """
        if self.directory is not None or self.insecure:
            return
        if listening:
            what, who = f"listening at {endpoint}, where other hosts can connect,", "anyone there"
            or_else = ", or listen on this host only (--bind 127.0.0.1)"
        else:
            what, who = f"connecting to {endpoint}, beyond this host,", "anyone on the way"
            or_else = ""
        raise ConfigError(
            f"{what} without keys: {who} could read and spoil the job; expected keys or a loopback "
            f"address; {_REMEDY}{or_else}"
        )


def is_local(endpoint: str) -> bool:
    """Return whether a ZeroMQ endpoint can be reached from this host only."""
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
