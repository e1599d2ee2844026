"""What the doctor asks of the operating system and the network."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from zmqtrain.config.honcho import running_counts
from zmqtrain.config.task import FindCounts

CONNECT_TIMEOUT_S = 2.0
ANYWHERE = ("*", "")

Probe: TypeAlias = Callable[[str, int], None]


def _resolve(host: str, port: int) -> None:
    socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _bind(host: str, port: int) -> None:
    interfaces = {name for _, name in socket.if_nameindex()}
    host = "" if host in interfaces or host in ANYWHERE else host
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)


def _connect(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()


@dataclass(frozen=True, slots=True)
class Probes:
    """Questions to the operating system about (host, port); each raises OSError for a no."""

    resolve: Probe = _resolve
    bind: Probe = _bind
    connect: Probe = _connect
    find_counts: FindCounts = running_counts
