"""Unauthenticated connections: each takes a descriptor that a job may need."""

from __future__ import annotations

import resource
from collections import Counter

MOST = 1024
_SPARE = 8  # newcomers leave one in this many descriptors free


def is_crowded(descriptor: int) -> bool:
    """Return whether few descriptors are left: a new one has the lowest free number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and descriptor >= soft - soft // _SPARE


class Newcomers:
    """The hosts of new connections, by descriptor, the oldest first."""

    def __init__(self, most: int = MOST) -> None:
        """``most``: the limit of newcomers."""
        self._most = most
        self._hosts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, descriptor: int, host: str, *, crowded: bool = False) -> list[int]:
        """Add a connection; return those to close: one if there are too many, half if ``crowded``.

        Each is the oldest of the host with the most, so that no host crowds out another one.
        """
        self._hosts.pop(descriptor, None)
        self._hosts[descriptor] = host
        too_many = len(self._hosts) // 2 if crowded else len(self._hosts) - self._most
        return [self._pop() for _ in range(too_many)]

    def _pop(self) -> int:
        (most, _), *_ = Counter(self._hosts.values()).most_common(1)
        oldest = next(one for one, host in self._hosts.items() if host == most)
        del self._hosts[oldest]
        return oldest

    def remove(self, descriptor: int) -> None:
        """Forget a connection that was authenticated or has ended."""
        self._hosts.pop(descriptor, None)
