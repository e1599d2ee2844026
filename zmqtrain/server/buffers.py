"""Which gradient of a ps's segment is whose, and who may reach the segment."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zmqtrain.actors.actor import Request
from zmqtrain.coordination.membership import Peer
from zmqtrain.errors import RefusedError
from zmqtrain.wire.messages import Mapped, MapSegment

if TYPE_CHECKING:
    from zmqtrain.server.server import ParameterServer

SPARE = 16  # gradients beyond those of the workers expected, for more workers and later lives

log = logging.getLogger(__name__)


class GradientBuffers:
    """Hands out the gradients of one segment.

    Two lives never get the same one, however they overlap: one that was taken for dead may still
    write to its own. It is given to another only once the kernel says that nobody holds it, and no
    update needs it. That goes for two lives of one process, too: it gives up the gradient of the
    first when it has that of the second.
    """

    def __init__(self, ps: ParameterServer) -> None:
        self._ps = ps
        self._limit = 2 * ps.workers + SPARE
        ps.on(MapSegment, self._on_map_segment)

    def assign(self, peer: Peer) -> None:
        """See to it that a worker has a gradient.

        Raises:
            RefusedError: there are too many workers.
            SegmentError: there is no memory for one more.
        """
        if peer.gradient >= 0:
            return
        number = self._free_number()
        self._ps.shard.segment.gradient(number)
        peer.gradient = number
        self._ps.marks.seat(peer.index, number, peer.lane)

    def has_died(self, peer: Peer) -> bool:
        """Say whether a worker's process has ended, as the kernel knows by the lock it held.

        Who has pulled on lane shm holds the lock of its gradient for as long as it lives.
        """
        has_lock = peer.lane == "shm" and peer.gradient >= 0 and peer.received >= 0
        return has_lock and not self._ps.shard.segment.is_held(peer.gradient)

    def _free_number(self) -> int:
        shard = self._ps.shard
        live = {peer.gradient for peer in self._ps.peers if not peer.gone}
        for number in range(self._limit):
            if number in live or shard.is_staged(number) or shard.segment.is_held(number):
                continue
            return number
        raise RefusedError(
            f"{self._ps.task} keeps gradients of at most {self._limit} workers: start it with a "
            "larger --workers"
        )

    def _on_map_segment(self, request: Request, message: MapSegment) -> None:
        peer = self._ps.peers.member(request)
        if message.nonce != self._ps.shard.segment.nonce:
            raise RefusedError(f"{request.sender} has not reached the segment of {self._ps.task}")
        peer.lane = message.lane
        if peer.is_worker:
            self.assign(peer)
        request.reply(Mapped(peer.gradient))
