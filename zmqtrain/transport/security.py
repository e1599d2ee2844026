"""A process's keys, and which connections it makes or refuses because of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from zmqtrain.errors import ConfigError
from zmqtrain.transport.keys import Owner, allowed_key, read_secret

_REMEDY = (
    "make keys (zmqtrain keys new --keys DIR) and give every task --keys DIR (or ZMQTRAIN_KEYS), "
    "or say --insecure (or ZMQTRAIN_INSECURE=1) on a network that you trust"
)


PREDECESSOR_S = 60.0
"""For so long a task takes another key for that of who had the address before: an engine may not
have ended it, nor renewed the name."""


@dataclass(frozen=True, slots=True)
class Security:
    """How far connections are trusted.

    With a directory of keys every tcp connection is encrypted and both of its ends prove who they
    are. Without one only this host is trusted, unless ``insecure``. ``owner`` is the task that the
    process is, ``servers`` the task expected to listen at each endpoint. For ``patience_s`` another
    key there is put up with, unless the right one was there before.
    """

    owner: Owner | None = None
    directory: Path | None = None
    insecure: bool = False
    servers: Mapping[str, Owner] = field(default_factory=dict)
    patience_s: float = 0.0

    def is_keyed(self, endpoint: str) -> bool:
        """Return whether connections there are encrypted; Unix sockets need not be."""
        return self.directory is not None and endpoint.startswith("tcp://")

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
            raise ConfigError("a process that is no task of a job has no key")
        return read_secret(self.keys(), self.owner)

    def server_key(self, endpoint: str) -> bytes:
        """Return the public key of the task that listens there.

        Raises:
            ConfigError: it is not known.
        """
        if endpoint not in self.servers:
            raise ConfigError(f"it is not known whose key is expected at {endpoint}")
        return allowed_key(self.keys(), self.servers[endpoint])

    def check(self, endpoint: str, *, listening: bool) -> None:
        """Refuse a connection beyond this host that nothing protects.

        Raises:
            ConfigError: it is one.
        """
        if self.directory is not None or self.insecure or is_local(endpoint):
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
