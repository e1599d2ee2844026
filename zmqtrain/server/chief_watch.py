"""Ends a ps that has no chief, instead of waiting forever."""

from __future__ import annotations

import logging
import time

from zmqtrain.actors.waits import PATIENCE_S
from zmqtrain.config.cluster import Role
from zmqtrain.config.timing import Timing
from zmqtrain.coordination.peers import Peer, PeerTable
from zmqtrain.errors import GroupOverError, OrphanedError, PeerLostError
from zmqtrain.observe.logs import StateLogger

log = logging.getLogger(__name__)


class ChiefWatch:
    """Watches for the chief's silence at a ps."""

    def __init__(self, timing: Timing, group: int, *, is_task: bool = True) -> None:
        """``group``: number of the workers' group that hosts the ps, 0 without groups.

        ``is_task``: the chief is a task of its own; otherwise worker 0 hosts it.
        """
        self._timing = timing
        self._group = group
        self._remedy = "start one (python -m zmqtrain.roles.chief)"
        if not is_task:
            self._remedy = "start worker 0, which hosts it"
        self._states = StateLogger(log)
        self.began_at = time.monotonic()

    def check(self, peers: PeerTable) -> None:
        """Log the absence of the chief.

        Raises:
            PeerLostError: no chief has joined in time.
            GroupOverError: it has been silent for too long, and another worker can host it.
            OrphanedError: it has been silent for too long.
        """
        chief = peers.get(Role.CHIEF, 0)
        heard_at = chief.heard_at if chief is not None else self.began_at
        silent_s = time.monotonic() - heard_at
        self._log(chief, silent_s)
        if silent_s < self._timing.join_timeout_s:
            return
        if chief is None:
            raise PeerLostError(
                f"no chief has joined within {silent_s:.0f} s: {self._remedy}, or raise "
                "--join-timeout-s"
            )
        lost = GroupOverError if self._group else OrphanedError
        raise lost(f"the chief has been silent for {silent_s:.0f} s and did not end the run")

    def _log(self, chief: Peer | None, silent_s: float) -> None:
        """Log each change of the chief's presence once."""
        limit_s = self._timing.join_timeout_s
        if chief is None and silent_s > PATIENCE_S:
            text = f"waiting for chief 0: it has not joined; giving up after {limit_s:g} s"
            self._states.state("chief", text)
        elif chief is not None and silent_s > self._timing.lease_s:
            text = f"{chief} is silent; training goes on without it, for up to {limit_s:g} s"
            self._states.state("chief", text, logging.WARNING)
        elif chief is not None:
            self._states.state("chief", f"{chief} is here", logging.DEBUG)
