"""States of a process on this host in which it cannot answer, according to the kernel."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from zmqtrain.config.cluster import IPC, parse_address

_HALTS = {
    psutil.STATUS_STOPPED: "is stopped (by SIGSTOP or Ctrl-Z): kill -CONT {pid} lets it go on",
    psutil.STATUS_TRACING_STOP: "is held by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a network file system",
    psutil.STATUS_ZOMBIE: "has ended, and its parent has not noticed",
}


def halt_at(endpoint: str) -> str:
    """Return why the process that listens at ``tcp://host:port`` or ``ipc://path`` cannot answer.

    An example is "process 123 is held by a debugger". The text is "" if the process could answer,
    is on another host, or belongs to another user.
    """
    try:
        for pid in _listeners(endpoint):
            if (text := _HALTS.get(psutil.Process(pid).status())) is not None:
                return f"process {pid} {text.format(pid=pid)}"
    except (psutil.Error, OSError):
        pass  # it has just ended, or /proc may not be read
    return ""


def _listeners(endpoint: str) -> Iterator[int]:
    """Yield the ids of the processes that listen there."""
    if endpoint.startswith(IPC):
        path = endpoint.removeprefix(IPC)
        found = psutil.net_connections("unix") if Path(path).is_socket() else []
        yield from (each.pid for each in found if each.pid and each.laddr == path)
        return
    address = parse_address(endpoint.removeprefix("tcp://"))
    hosts = {address.host, "127.0.0.1", "0.0.0.0", "::"}
    for each in psutil.net_connections("tcp") if address.host in _own_hosts() else ():
        is_listening = each.status == psutil.CONN_LISTEN and each.laddr.port == address.port
        if each.pid and is_listening and each.laddr.ip in hosts:
            yield each.pid


def _own_hosts() -> set[str]:
    names = {"localhost", socket.gethostname().lower()}
    return names.union(each.address for many in psutil.net_if_addrs().values() for each in many)
