"""The tasks of a job: their roles, and the addresses of the ps.

Only a ps binds a socket. Workers and the chief connect to every ps. Ps 0 is the leader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, ip_address

from zmqtrain.errors import ConfigError

MAX_PORT = 65535
MAX_TASKS = 100_000  # of one role
IPC = "ipc://"
UNIX = "unix://"  # the same

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


class Role(StrEnum):
    """The role of a task in the cluster."""

    PS = "ps"
    WORKER = "worker"
    CHIEF = "chief"


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One process of the cluster: its role and its number among those of that role, from 0."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def hyphenated(self) -> str:
        """The task's name without a blank, for files and engines."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The tasks of a job and their addresses, as options or TF_CONFIG give them.

    ``ps``: address of ps i at position i.
    ``workers``: number of workers that the job expects; a worker may know a smaller number.
    ``chief``: whether the chief is a separate task (True) or hosted by worker 0; None: not given.
    ``worker_addresses``: where workers can listen, as far as known; "" for one without an address.
    ``chief_address``: where the chief can listen, if TF_CONFIG has it.
    ``max_workers``: largest number of workers later; 0: the same as ``workers``.
    ``base_port``: port of the first worker on this host, if workers listen and have no addresses.
    """

    ps: tuple[str, ...]
    workers: int
    chief: bool | None = None
    worker_addresses: tuple[str, ...] = ()
    chief_address: str = ""
    max_workers: int = 0
    base_port: int = 2222


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address: ``host`` is a name in lower case or an IP without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{_bracketed(self.host)}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        ip = ip_of(self.host)
        return self.host == "localhost" if ip is None else ip.is_loopback


def parse_index(text: str) -> int | None:
    """Return the task number that ``text`` spells, None if it is not one or has more zeros."""
    return int(text) if _INDEX.fullmatch(text) and int(text) < MAX_TASKS else None


def parse_address(text: str) -> Address:
    """Parse ``host:port`` or ``[IPv6]:port``.

    Raises:
        ConfigError: there is a scheme, no host, no port, a port outside 1..65535, an IPv6 address
            without brackets, a wildcard, or a host that is neither a name nor an IP address.
    """
    text = text.strip()
    if not text:
        raise ConfigError("an address is empty; expected host:port; give or remove it")
    if scheme := _SCHEME.match(text):
        rest = text[scheme.end() :].partition("/")[0]
        raise ConfigError(
            f"address {text!r} has the scheme {scheme[0]}; expected host:port; write {rest!r}"
        )
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        raise ConfigError(f"address {text!r} has no port; expected host:port; add the ps's port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(
            f"address {text!r} looks like IPv6 without brackets; expected [IPv6]:port, such as "
            "[::1]:2222; put brackets around the IP address"
        )
    return Address(_host(host, text), _port(port, text))


def is_of_this_host(address: str) -> bool:
    """Return whether only tasks of this host can reach an address: "", a path, or loopback."""
    return not address or address.startswith((IPC, UNIX)) or parse_address(address).is_loopback


def canonical_address(text: str) -> str:
    """Return the canonical form of an address, so that equal addresses compare equal.

    ``unix:///path`` (a socket for a cluster on one host) may also be written ``ipc:///path``.

    Raises:
        ConfigError: see :func:`parse_address`, or the path is missing.
    """
    text = text.strip()
    if text.startswith(UNIX):
        text = IPC + text.removeprefix(UNIX)
    if not text.startswith(IPC):
        return str(parse_address(text))
    if text == IPC:
        raise ConfigError(f"address {text!r} has no path; expected unix:///path/to/socket")
    return text


def parse_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses in ``host:port,host:port``; for a number N, N times "".

    Raises:
        ValueError: one of them is not an address.
    """
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_TASKS)):
        return ("",) * int(text)
    try:
        return tuple(map(canonical_address, text.split(",")))
    except ConfigError as error:
        raise ValueError(str(error)) from None


def parse_workers(text: str) -> tuple[str, ...]:
    """Return the addresses of workers, as :func:`parse_addresses` does.

    Raises:
        ValueError: this is neither a number nor addresses.
    """
    if ":" not in text and not text.strip().isdigit():
        raise ValueError("expected a number from 1 on, or addresses as host:port,host:port")
    return parse_addresses(text)


def connect_endpoint(address: str) -> str:
    """Return the ZeroMQ endpoint at which peers reach a ps.

    ``localhost`` becomes 127.0.0.1, where the ps binds; it could also resolve to ::1.
    """
    if address.startswith(IPC):
        return address
    parsed = parse_address(address)
    host = "127.0.0.1" if parsed.host == "localhost" else parsed.host
    return f"tcp://{Address(host, parsed.port)}"


def bind_endpoint(address: str, host: str | None = None) -> str:
    """Return the ZeroMQ endpoint that the ps of this address binds.

    ``host`` (flag ``--bind``) is an IP address, an interface's name or ``*``. By default a loopback
    address is bound itself, so that other hosts cannot reach it, and for any other one all
    interfaces: the name may belong to a service in front of this host. ``ipc://`` stays as it is.
    """
    if address.startswith(IPC):
        return address
    parsed = parse_address(address)
    ip = ip_of(parsed.host)
    if host is None and parsed.is_loopback:
        host = "127.0.0.1" if ip is None else parsed.host
    elif host is None:
        host = "::" if isinstance(ip, IPv6Address) else "0.0.0.0"
    return f"tcp://{_bracketed(host.strip('[]'))}:{parsed.port}"


def ip_of(host: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address that ``host`` spells, None if it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host(text: str, address: str) -> str:
    has_brackets = text.startswith("[")
    host = text[1:-1] if has_brackets else text
    ip = ip_of(host)
    if not host:
        raise ConfigError(f"address {address!r} has no host; expected host:port; add the ps's host")
    if host == "*" or (ip is not None and ip.is_unspecified):
        raise ConfigError(
            f"address {address!r} names every interface, where no peer can connect; expected a "
            f"host that peers can reach; to listen on all of them, use --bind {host}"
        )
    if has_brackets:
        is_host = isinstance(ip, IPv6Address)
    else:
        is_number = host.replace(".", "").isdigit()
        is_host = ip is not None or (not is_number and _HOST_NAME.fullmatch(host) is not None)
    if not is_host:
        raise ConfigError(
            f"address {address!r} has the host {host!r}; expected a host name or an IP address"
        )
    return host.lower() if ip is None else str(ip)


def _port(text: str, address: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else 0
    if not 1 <= port <= MAX_PORT:
        raise ConfigError(
            f"address {address!r} has the port {text!r}; expected a number from 1 to {MAX_PORT}"
        )
    return port
