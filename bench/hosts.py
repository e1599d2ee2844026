"""Hosts on one machine: network namespaces on a switch that loses what it is told to lose.

Nothing of the machine's own network is touched; all of it is gone at the end.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

NAMESPACES = Path("/var/run/netns")
INTERFACE = "eth0"  # of each host
# What is programmed into the switch to lose a packet: return TC_ACT_SHOT. Unlike netem's loss,
# most kernels have it; and the host that sends does not notice, as it would if its own queue lost.
LOSE = ("bpf", "direct-action", "bytecode", "1,6 0 0 2,")
_CLONE_NEWNET = 0x40000000

Result = TypeVar("Result")


class Hosts:
    """Hosts 0, 1, ... at a switch, each of them a network namespace of its own."""

    def __init__(self, count: int) -> None:
        self._token = secrets.token_hex(3)
        self._hosts = range(count)
        self._inside = [
            ThreadPoolExecutor(1, initializer=_enter, initargs=(self._path(self.namespace(host)),))
            for host in self._hosts
        ]

    @property
    def _switch(self) -> str:
        return f"zmqtrain-{self._token}-switch"

    def namespace(self, host: int) -> str:
        return f"zmqtrain-{self._token}-{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> Hosts:
        """Raises CalledProcessError if this machine does not offer what is needed."""
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "dev", "bridge", "up")
        for host in self._hosts:
            own, port = self.namespace(host), _port(host)
            run("ip", "netns", "add", own)
            wire = ("type", "veth", "peer", "name", port, "netns", self._switch)
            run("ip", "-n", own, "link", "add", INTERFACE, *wire)
            run("ip", "-n", self._switch, "link", "set", "dev", port, "master", "bridge", "up")
            run("tc", "-n", self._switch, "qdisc", "add", "dev", port, "clsact")
            run("ip", "-n", own, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                run("ip", "-n", own, "link", "set", "dev", device, "up")

    def close(self) -> None:
        """Remove what was made; what still runs in a host keeps it until it ends."""
        for inside in self._inside:
            inside.shutdown()
        for name in (*map(self.namespace, self._hosts), self._switch):
            if self._path(name).exists():
                run("ip", "netns", "delete", name)

    def cut(self, host: int, *, hears: bool = False, is_heard: bool = False) -> None:
        """Lose what is sent to a host, unless it ``hears``, and by it, unless it ``is_heard``."""
        for way, is_open in (("egress", hears), ("ingress", is_heard)):
            if not is_open:
                port = ("dev", _port(host), way)
                run("tc", "-n", self._switch, "filter", "add", *port, *LOSE)

    def throttle(self, host: int, mbit_s: float) -> None:
        """Have each direction of a host's link carry this many Mbit/s.

        What goes through at once is a millisecond's worth. On a fast link it has to be more than
        the 64 KB that TCP hands over: to cut them to packets takes the kernel a core's whole time.
        """
        burst = max(32_000, int(125 * mbit_s))
        self._queue(host, "tbf", "rate", f"{mbit_s}mbit", "burst", f"{burst}", "latency", "100ms")

    def heal(self, host: int) -> None:
        """Let a host's link be as it was in the beginning."""
        for change in ("delete", "add"):  # with all that hangs on it
            run("tc", "-n", self._switch, "qdisc", change, "dev", _port(host), "clsact")
        self._queue(host, "noqueue")

    def command(self, host: int, *command: str) -> list[str]:
        """Return how to start a command on a host, as the process that is started."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def inside(self, host: int, work: Callable[[], Result]) -> Result:
        """Return what ``work`` returns, done by a thread whose network is that of a host."""
        return self._inside[host].submit(work).result()

    def _queue(self, host: int, *discipline: str) -> None:
        """Have packets wait so, at both ends of a host's link, before they go through."""
        for namespace, device in ((self.namespace(host), INTERFACE), (self._switch, _port(host))):
            run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *discipline)

    def _path(self, namespace: str) -> Path:
        return NAMESPACES / namespace


def _port(host: int) -> str:
    return f"port{host}"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _enter(namespace: Path) -> None:
    """Give the calling thread another network."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(descriptor)
