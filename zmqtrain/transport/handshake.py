"""Reasons why two ends do not connect, derived from ZeroMQ's handshake events.

libzmq retries forever and reports no reason to the refused end or to the application.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable

import zmq

from zmqtrain.transport.base import Endpoint, OnFailure, RoutingId, ignore_failure
from zmqtrain.transport.greeting import CURVE, NULL, mechanism_at, reason
from zmqtrain.transport.security import Security
from zmqtrain.wire.buffers import Buffer

RETRY_S = 1.0  # from a refusal of a key that may soon be admitted to the next attempt
BROKEN = 3  # handshakes broken off in quick succession before an inquiry
BROKEN_WITHIN_S = 5.0  # shorter than the timeout of an end that gets no answer

_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_NO_DETAIL = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
ENDED = int(zmq.EVENT_DISCONNECTED)
ACCEPTED = int(zmq.EVENT_ACCEPTED)
EVENTS = ACCEPTED | _SUCCEEDED | _NO_DETAIL | PROTOCOL | _AUTH | ENDED
_DENIED = 400  # ZAP status, after which libzmq does not retry

REFUSALS = {
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): "a peer has no key",
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "a peer expects another key than ours",
}
"""Reasons by the value of an event PROTOCOL, for a listener with keys."""


class PeerWatch:
    """Finds out why a listener refuses this end's connection."""

    def __init__(
        self,
        events: Endpoint,
        endpoint: str,
        security: Security,
        public: str,
        reconnect: Callable[[], None],
        *,
        ask: Callable[[str, str], Awaitable[str | None]] = mechanism_at,
    ) -> None:
        """``public``: our key, "" without one. ``ask`` inquires.

        ``reconnect`` tries again after a refusal of our key that may be temporary; after the
        patience of ``security`` such a refusal, or an unexpected first key, is final.
        """
        self._events = events
        self._endpoint = endpoint
        self._mechanism = CURVE if security.is_keyed(endpoint) else NULL
        self._security, self._public = security, public
        self._ask = ask
        self._reconnect = reconnect
        self._on_failure: OnFailure = ignore_failure
        self._broken: deque[float] = deque(maxlen=BROKEN)
        self._explained = False  # an event has given the reason why the connection will end
        self._was_right = False  # the listener had the expected key before
        self._wrong_since: float | None = None  # it has another key, or refuses ours
        self._retry: asyncio.TimerHandle | None = None
        self._inquiry: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._events.start(self._take)

    def on_failure(self, callback: OnFailure) -> None:
        self._on_failure = callback

    def close(self) -> None:
        self._on_failure = ignore_failure
        self._events.close()
        if self._retry is not None:
            self._retry.cancel()
        if self._inquiry is not None:
            self._inquiry.cancel()

    def _take(self, _: RoutingId, frames: list[Buffer]) -> None:
        event, value = parsed(frames)
        was_explained, self._explained = self._explained, event != ENDED
        if event == _SUCCEEDED:
            self._broken.clear()
            self._was_right, self._wrong_since = True, None
        elif event == _AUTH and value == _DENIED:
            self._on_denied()
        elif event == PROTOCOL or (event == ENDED and not was_explained):
            self._inquire_soon()  # libzmq does not retry
        elif event == _NO_DETAIL:
            now = time.monotonic()
            self._broken.append(now)
            if len(self._broken) == BROKEN and now - self._broken[0] < BROKEN_WITHIN_S:
                self._broken.clear()
                self._inquire_soon()

    def _on_denied(self) -> None:
        """Handle the refusal of our key, after which libzmq does not retry."""
        security, was_admitted = self._security, self._was_right
        may_wait = security.may_be_admitted(self._public, was_admitted=was_admitted)
        waits = may_wait and self._has_patience()
        self._on_failure(
            f"it does not admit the key of {security.owner}, which is not in its registry or was "
            "revoked; look at zmqtrain keys list where it runs",
            not waits,
        )
        if waits:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._reconnect)

    def _inquire_soon(self) -> None:
        if self._inquiry is None or self._inquiry.done():
            self._inquiry = asyncio.get_running_loop().create_task(self._inquire())

    async def _inquire(self) -> None:
        theirs = await self._ask(self._endpoint, self._mechanism)
        if theirs is None or (theirs == self._mechanism == NULL):  # it is just ending or starting
            self._on_failure("it closes every connection immediately", False)
        else:
            may_be_a_predecessor = self._mechanism == theirs == CURVE and not self._was_right
            is_final = not (may_be_a_predecessor and self._has_patience())
            self._on_failure(reason(self._mechanism, theirs), is_final)

    def _has_patience(self) -> bool:
        now = time.monotonic()
        if self._wrong_since is None:
            self._wrong_since = now
        return now - self._wrong_since < self._security.patience_s


def watch(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a socket that receives the events of ``socket`` from now on."""
    address = f"inproc://handshakes-{id(socket)}"
    socket.monitor(address, EVENTS)
    events = context.socket(zmq.PAIR)
    events.set(zmq.LINGER, 0)
    events.set(zmq.RCVHWM, 0)  # a full queue would have the I/O thread wait
    events.connect(address)
    return events


def parsed(frames: list[Buffer]) -> tuple[int, int]:
    """Return the number and the value of an event of libzmq's monitor."""
    event, value = struct.unpack("=HI", frames[0])
    return int(event), int(value)
