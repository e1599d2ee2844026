"""ZeroMQ's question whether a key may come in, answered on the event loop (ZAP, RFC 27).

Whatever goes wrong in answering lets nobody in: libzmq refuses who gets no answer, and who is told
to come back later tries again by itself. Connections that were let in before go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from zmqtrain.errors import ZmqTrainError
from zmqtrain.transport.base import OnFailure, RoutingId, UnreachableError, ignore_failure
from zmqtrain.transport.gate import Gate
from zmqtrain.wire.buffers import Buffer

if TYPE_CHECKING:
    from zmqtrain.transport.router_dealer import ZmqEndpoint

ADDRESS = "inproc://zeromq.zap.01"
VERSION = b"1.0"
ADMITTED, LATER, DENIED = b"200", b"300", b"400"
LOOK_S = 1.0
"""How often the registry is looked at, and whether this handler is there."""

log = logging.getLogger(__name__)


class Doorkeeper:
    """Lets in whose key the gate knows; their messages carry the public key as ``User-Id``."""

    def __init__(self, gate: Gate, listen: Callable[[], ZmqEndpoint]) -> None:
        """``listen`` makes the endpoint at which questions arrive; there can be one at a time.

        ``on_failure`` is told of everyone who is turned away.
        """
        self._gate = gate
        self._listen = listen
        self._endpoint = listen()
        self.on_failure: OnFailure = ignore_failure
        self._timer: asyncio.TimerHandle | None = None
        self._trouble = ""

    def start(self) -> None:
        """Answer from now on."""
        self._endpoint.start(self._answer)
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._endpoint.close()

    def _look(self) -> None:
        """See to it that the handler is there and the gate is up to date."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        try:
            if self._endpoint.closed:
                self._endpoint = self._listen()
                self._endpoint.start(self._answer)
                log.warning("who checks keys was gone; it is back")
            self._gate.refresh()
            self._trouble = ""
        except Exception as error:
            self._tell(error)

    def _answer(self, peer: RoutingId, frames: list[Buffer]) -> None:
        try:
            status, user = self._verdict(frames)
        except Exception as error:
            self._tell(error)
            status, user = LATER, b""
        request_id = bytes(frames[2]) if len(frames) > 2 else b""
        try:
            self._endpoint.send([b"", VERSION, request_id, status, b"", user, b""], peer)
        except UnreachableError as error:
            log.debug("a connection was closed before its key was checked: %s", error)

    def _verdict(self, frames: list[Buffer]) -> tuple[bytes, bytes]:
        _, version, _, _, address, _, mechanism, *credentials = map(bytes, frames)
        if version != VERSION or mechanism != b"CURVE" or len(credentials) != 1:
            raise ValueError(f"a question of ZAP {version!r} for {mechanism!r}")
        public = credentials[0].hex()
        self._gate.refresh()
        if self._gate.find(public) is not None:
            return ADMITTED, public.encode()
        log.debug("key %s of %r is not allowed", public, address)
        who = address.decode("ascii", "replace")
        self.on_failure(f"{who} came with {self._gate.objection(public)}", False)
        return DENIED, b""

    def _tell(self, error: Exception) -> None:
        """Log what keeps keys from being checked, once."""
        text = f"{type(error).__name__}: {error}"
        if text != self._trouble:
            self._trouble = text
            bug = None if isinstance(error, ZmqTrainError) else error
            log.error("nobody new is let in for now: %s", error, exc_info=bug)
