"""Identities of processes, and whether a process on the same kernel has ended."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_STARTED = 19  # place of the start time among the fields of /proc/PID/stat behind the name
_ENDED = ("Z", "X")  # states of an ended process for which its parent has not waited


def process_name() -> str:
    """Return host:pid, for log and status."""
    return f"{socket.gethostname()}:{os.getpid()}"


@cache
def process_identity() -> str:
    """Return kernel, PID namespace, PID and start time of this process; "" if not known."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").stat().st_ino
        started = _fields(os.getpid())[_STARTED]
    except OSError:
        return ""
    return f"{boot}/{namespace}/{os.getpid()}/{started}"


def has_ended(process: str) -> bool:
    """Return whether the process of this identity is known to have ended.

    A peer states its identity itself; a wrong one affects only that peer.
    """
    own, given = process_identity().split("/"), process.split("/")
    if len(own) != 4 or len(given) != 4 or given[:2] != own[:2] or not given[2].isdecimal():
        return False
    try:
        os.kill(int(given[2]), 0)
        fields = _fields(int(given[2]))
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # it belongs to another user, or there is no such process
    return fields[0] in _ENDED or fields[_STARTED] != given[3]


def _fields(pid: int) -> list[str]:
    """Return the fields of a process's status, from its state on."""
    text = (_PROC / str(pid) / "stat").read_text()
    return text.rpartition(")")[2].split()
