"""The liveness of a link's peer, derived from silence and answers to heartbeats."""

from __future__ import annotations

import time
from collections import deque

from zmqtrain.config.timing import Timing

BEATS = 64  # last heartbeats whose ids are kept, to recognise their refusals


class Liveness:
    """The last sign of life of a peer. Times are of the monotonic clock."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._beats: deque[int] = deque(maxlen=BEATS)
        self.received_at: float | None = None  # the last message of the peer

    def begin_beat(self, request_id: int) -> None:
        self._beats.append(request_id)

    def is_beat(self, request_id: int) -> bool:
        """Return whether this was one of the last heartbeats of the current life."""
        return request_id in self._beats

    def begin_life(self) -> None:
        """Ignore answers to the heartbeats so far."""
        self._beats.clear()

    def forgive(self, before: float, now: float) -> None:
        """Restart the peer's silence if this process was suspended between two heartbeats."""
        most_s = self._timing.heartbeat_s + self._timing.peer_timeout_s / 2
        if now - before > most_s and self.received_at is not None:
            self.received_at = now

    def silent_s(self, now: float) -> float:
        """Return the seconds since the peer's last message; 0 before the first."""
        return now - self.received_at if self.received_at is not None else 0.0

    def given_up_at(self) -> float | None:
        """Return when a silent peer is given up; None: it is alive, or has never answered."""
        at, now = self.received_at, time.monotonic()
        return None if at is None or self.is_alive(now) else at + self._timing.peer_timeout_s

    def is_alive(self, now: float) -> bool:
        return self.received_at is not None and self.silent_s(now) < 3 * self._timing.heartbeat_s
