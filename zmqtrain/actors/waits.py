"""The waits of tasks for one another: every await on a peer is entered here while it lasts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from zmqtrain.protocol.status import Wait

PATIENCE_S = 2.0  # longer waits are logged

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    peer: str
    reason: str
    since: float
    until: float | None
    is_logged: bool = False


class Waits:
    """The waits of one task; times are of the monotonic clock.

    ``hosts``: the task that hosts a peer, by the peer's name; a peer may be a task of its own.
    ``halts``: by a peer's name, a function that returns why it cannot answer; "": unknown.
    ``limits``: by a peer's name, one that returns when it is given up; None: it is alive.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.hosts: Mapping[str, str] = {}
        self.halts: dict[str, Callable[[], str]] = {}
        self.limits: dict[str, Callable[[], float | None]] = {}
        self._entries: dict[int, _Entry] = {}
        self._last = 0

    def begin(self, peer: str, reason: str, timeout_s: float | None = None) -> int:
        """Enter a wait; return the token that ends it."""
        self._last += 1
        now = time.monotonic()
        until = None if timeout_s is None else now + timeout_s
        self._entries[self._last] = _Entry(peer, reason, now, until)
        return self._last

    def end(self, token: int) -> None:
        self._entries.pop(token, None)

    @contextmanager
    def on(self, peer: str, reason: str) -> Iterator[None]:
        """Enter a wait for as long as the block lasts."""
        token = self.begin(peer, reason)
        try:
            yield
        finally:
            self.end(token)

    def log_long(self) -> None:
        """Log every wait that has become long, once."""
        for entry in self._entries.values():
            if not entry.is_logged and time.monotonic() - entry.since > PATIENCE_S:
                entry.is_logged = True
                host = self.hosts.get(entry.peer)
                peer = f"{entry.peer}, which {host} hosts" if host else entry.peer
                halt = self.halts.get(entry.peer, str)()
                text = f"{entry.reason}; {halt}" if halt else entry.reason
                log.log(logging.WARNING if halt else logging.INFO, "waiting for %s: %s", peer, text)

    def snapshot(self) -> tuple[Wait, ...]:
        """Return the current waits, the longest first."""
        now, waits = time.monotonic(), list[Wait]()
        for entry in sorted(self._entries.values(), key=lambda entry: entry.since):
            until = entry.until
            if until is None and entry.peer in self.limits:
                until = self.limits[entry.peer]()
            left_s = None if until is None else max(0.0, until - now)
            waits.append(Wait(self.owner, entry.peer, entry.reason, now - entry.since, left_s))
        return tuple(waits)


async def within(limit_s: float, event: asyncio.Event) -> bool:
    """Wait for an event; return whether it came in time."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
