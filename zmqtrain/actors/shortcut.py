"""A link's shortcut: made when there is one, left when it ends, and then made again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from zmqtrain.transport.base import Endpoint, OnMessage, Selective, UnreachableError
from zmqtrain.transport.shortcut import fits
from zmqtrain.wire.buffers import Buffer

log = logging.getLogger(__name__)


class Shortcut:
    """The shorter way to a link's peer, as long as there is one."""

    def __init__(self, peer: str, on_message: OnMessage) -> None:
        """``on_message`` is given what comes by it."""
        self.is_sought = False  # it is time to try and make one
        self._peer = peer
        self._on_message = on_message
        self._endpoint: Endpoint | None = None
        self._make: Callable[[], Endpoint] | None = None

    def open(self, make: Callable[[], Endpoint]) -> None:
        """Make one, and another one whenever it has ended.

        ``make`` raises UnreachableError if there is none; it is called again before a later push,
        once in a heartbeat.
        """
        self.close()
        self._make = make
        self.take()

    def close(self) -> None:
        """Leave it, and make no other."""
        self._make = None
        self._leave()

    def seek(self) -> None:
        """Have another one made before the next push, if one is wanted and there is none."""
        self.is_sought = self._endpoint is None and self._make is not None

    def take(self) -> None:
        """Make one, if one is wanted and there is none."""
        self.is_sought = False
        if self._endpoint is not None or self._make is None:
            return
        try:
            self._endpoint = self._make()
        except UnreachableError as error:
            log.debug("%s: %s", self._peer, error)
            return
        log.info("pushes to %s take a shortcut", self._peer)
        self._endpoint.start(self._on_message)
        if isinstance(self._endpoint, Selective):
            self._endpoint.tell(lambda text, _: self._leave())

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message this way; False if it has to go the usual one."""
        if self._endpoint is None or not fits(frames):
            return False
        try:
            self._endpoint.send(frames)
        except UnreachableError as error:
            log.debug("%s: %s", self._peer, error)
            self._leave()
            return False
        return True

    def _leave(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
