"""The departure of a ps on a signal, with a checkpoint of all that it has answered.

A worker goes on once every ps has answered its push. So nothing after the checkpoint of the first
leaving ps counts, and that checkpoint serves every ps that leaves later.
"""

from __future__ import annotations

import asyncio
import logging

from zmqtrain.actors.link import Link
from zmqtrain.errors import FencedError, ZmqTrainError
from zmqtrain.server.executor import Executor
from zmqtrain.server.state import ShardState
from zmqtrain.wire.control import RequestSave
from zmqtrain.wire.messages import Done, Leave

log = logging.getLogger(__name__)


class Drain:
    """Has the chief save a checkpoint after which the ps carries out no order."""

    def __init__(self, state: ShardState, executor: Executor, heartbeat_s: float) -> None:
        self._state = state
        self._executor = executor
        self._heartbeat_s = heartbeat_s
        self._leader_left = asyncio.Event()
        self._reason = ""  # why the leader could leave
        self._generation = 0  # in which it left

    def leader_left(self, reason: str) -> None:
        """Note that ps 0 has left with a checkpoint; there is no other one until it is back."""
        self._reason = f"too: ps 0 left {reason}"
        self._generation = self._state.generation
        self._leader_left.set()

    def leader_is_back(self) -> None:
        self._leader_left.clear()

    async def have_saved(self, link: Link) -> str:
        """Return a text about the checkpoint with which this ps may leave, "" without one."""
        if 0 < self._generation < self._state.generation:  # the leader has come back
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
            if isinstance(saved.message, Leave):  # another ps has already left
                return f"too: {saved.message.reason}"
            if self._executor.halted:  # otherwise it answers an earlier request
                return f"after {saved.expect(Done).text}"
