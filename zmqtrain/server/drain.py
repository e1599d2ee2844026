"""What a ps that was told to leave waits for: a checkpoint that holds all that it has answered.

A worker goes on once every ps has answered its push. So nothing counts that comes after the
checkpoint with which the first ps leaves, and that checkpoint serves every ps that leaves later.
"""

from __future__ import annotations

import asyncio
import logging

from zmqtrain.actors.link import Link
from zmqtrain.errors import FencedError, ZmqTrainError
from zmqtrain.server.executor import Executor
from zmqtrain.server.state import ShardState
from zmqtrain.wire.messages import Done, Leave, RequestSave

log = logging.getLogger(__name__)


class Drain:
    """Has the chief save a checkpoint, and carries out nothing after it."""

    def __init__(self, state: ShardState, executor: Executor, heartbeat_s: float) -> None:
        self._state = state
        self._executor = executor
        self._heartbeat_s = heartbeat_s
        self._leader_left = asyncio.Event()
        self._reason = ""  # why the leader could leave
        self._generation = 0  # in which it left; 0: before any began here

    def leader_left(self, reason: str) -> None:
        """The leader's ps has left with a checkpoint; until it is back there is no other one."""
        self._reason = f"too: ps 0 left {reason}"
        self._generation = self._state.generation
        self._leader_left.set()

    def leader_is_back(self) -> None:
        self._leader_left.clear()

    async def have_saved(self, link: Link) -> str:
        """Return with which checkpoint this ps may leave, "" if there is none.

        ``link``: to the leader.
        """
        if 0 < self._generation < self._state.generation:  # a leader that is back began this one
            self.leader_is_back()
        asking = asyncio.ensure_future(self._ask(link))
        left = asyncio.ensure_future(self._leader_left.wait())
        try:
            await asyncio.wait([asking, left], return_when=asyncio.FIRST_COMPLETED)
            reason = self._reason if left.done() else asking.result()
        except ZmqTrainError as error:
            log.warning("leaving without a checkpoint: %s", error)
            return ""
        finally:
            asking.cancel()
            left.cancel()
        log.info("leaving %s", reason)
        return reason

    async def _ask(self, link: Link) -> str:
        while True:
            self._executor.halt_at_snapshot()
            try:
                saved = await link.request(RequestSave(), reason="it saves before this ps goes")
            except FencedError:  # ps 0 has a new life, too
                await asyncio.sleep(self._heartbeat_s)
                continue
            if isinstance(saved.message, Leave):  # another ps has left before
                return f"too: {saved.message.reason}"
            if self._executor.halted:  # else it is the answer to a request before
                return f"after {saved.expect(Done).text}"
