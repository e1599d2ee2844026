"""Authentication at a listener with keys: answers ZeroMQ's ZAP requests (RFC 27).

pyzmq's authenticators would not do. They can only admit or refuse for good, so a registry that
cannot be read for a moment would keep tasks out forever, and an error in a check ends them
silently. They also check handshakes only, so an admitted peer could go on with a revoked key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from socket import AF_INET, SHUT_RDWR, SOCK_STREAM, socket
from typing import Any

import zmq

from zmqtrain.errors import ZmqTrainError
from zmqtrain.transport import handshake
from zmqtrain.transport.base import Endpoint, OnFailure, RoutingId, UnreachableError, ignore_failure
from zmqtrain.transport.newcomers import Newcomers, is_crowded
from zmqtrain.transport.registry import KnownPeer, Registry
from zmqtrain.wire.buffers import Buffer

ADDRESS = "inproc://zeromq.zap.01"
VERSION = b"1.0"
ADMITTED, LATER, REFUSED = b"200", b"300", b"400"
REFRESH_S = 1.0
CLOSED = 256  # connections remembered as closed

log = logging.getLogger(__name__)


class Authenticator:
    """Admits the holders of allowed keys, and closes the connection of one whose key is revoked.

    An error in a check admits no peer: libzmq refuses a peer without an answer, and a peer with a
    temporary refusal tries again by itself. Admitted connections go on.
    """

    def __init__(self, registry: Registry, zap: Endpoint, events: Endpoint) -> None:
        """``zap`` receives ZeroMQ's requests, ``events`` the listener's handshake events."""
        self._registry = registry
        self._zap = zap
        self._events = events
        self._on_failure: OnFailure = ignore_failure
        self._timer: asyncio.TimerHandle | None = None
        self._fault = ""
        self._closed: deque[bytes] = deque(maxlen=CLOSED)
        self._newcomers = Newcomers()

    def start(self) -> None:
        self._zap.start(self._answer)
        self._events.start(self._on_event)
        self._refresh_later()

    def on_failure(self, callback: OnFailure) -> None:
        """Call ``callback`` for every refused connection."""
        self._on_failure = callback

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._events.close()
        self._zap.close()

    def identify(self, name: bytes, frame: zmq.Frame) -> KnownPeer | None:
        """Return the sender of a frame on the connection ``name``, None if its key is revoked.

        The frame decides: a peer chooses its name, and could take that of one that has just left.
        """
        try:
            public: Any = frame.get("User-Id")
        except zmq.ZMQError:  # it was admitted without a ZAP request
            public = ""
        key = self._registry.find(public)
        if key is not None:
            if self._newcomers:
                self._newcomers.remove(frame.get(zmq.SRCFD))
            return key.peer(name)
        if name not in self._closed:
            self._closed.append(name)
            _close_connection(frame.get(zmq.SRCFD))
        return None

    def _refresh_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(REFRESH_S, self._refresh)

    def _refresh(self) -> None:
        """Read the registry again if it has changed, so that revoked keys are noticed soon."""
        self._refresh_later()
        try:
            self._registry.refresh()
            self._fault = ""
        except Exception as error:
            self._log_fault(error)

    def _answer(self, peer: RoutingId, frames: list[Buffer]) -> None:
        try:
            status, user = self._verdict(frames)
        except Exception as error:
            self._log_fault(error)
            status, user = LATER, b""
        request_id = bytes(frames[2]) if len(frames) > 2 else b""
        try:
            self._zap.send([b"", VERSION, request_id, status, b"", user, b""], peer)
        except UnreachableError as error:
            log.debug("a connection was closed before its key was checked: %s", error)

    def _verdict(self, frames: list[Buffer]) -> tuple[bytes, bytes]:
        """Return the status, and the User-Id that messages of the connection will carry."""
        _, version, _, _, address, _, mechanism, *credentials = map(bytes, frames)
        if version != VERSION or mechanism != b"CURVE" or len(credentials) != 1:
            raise ValueError(f"a ZAP request of version {version!r} for {mechanism!r}")
        public = credentials[0].hex()
        self._registry.refresh()
        if self._registry.find(public) is not None:
            return ADMITTED, public.encode()
        host = address.decode("ascii", "replace")
        self._on_failure(f"{host} connected with {self._registry.describe(public)}", False)
        return REFUSED, b""

    def _on_event(self, _: RoutingId, frames: list[Buffer]) -> None:
        event, value = handshake.parsed(frames)
        if event == handshake.PROTOCOL:
            reason = handshake.REFUSALS.get(value, "a peer does not speak ZMTP")
            self._on_failure(reason, False)
        elif event == handshake.ACCEPTED:
            self._take_in(value)
        elif event == handshake.ENDED:
            self._newcomers.remove(value)

    def _take_in(self, descriptor: int) -> None:
        """Note a connection of an unknown peer; close others if there are too many."""
        with contextlib.suppress(OSError), _connection(descriptor) as connection:
            host = connection.getpeername()[0]
            crowded = is_crowded(descriptor)
            for left in self._newcomers.add(descriptor, host, crowded=crowded):
                _close_connection(left, connection.getsockname()[1])

    def _log_fault(self, error: Exception) -> None:
        """Log once why keys cannot be checked."""
        text = f"{type(error).__name__}: {error}"
        if text != self._fault:
            self._fault = text
            bug = None if isinstance(error, ZmqTrainError) else error
            log.error("no new connection is admitted for now: %s", error, exc_info=bug)


@contextlib.contextmanager
def _connection(descriptor: int) -> Iterator[socket]:
    """Yield the socket of a descriptor that libzmq owns, without another descriptor."""
    connection = socket(AF_INET, SOCK_STREAM, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _close_connection(descriptor: int, port: int | None = None) -> None:
    """Close a connection, for which libzmq has no call; ``port``: of the listener it came to.

    If its descriptor belongs to another connection by now, that one reconnects by itself.
    """
    with contextlib.suppress(OSError), _connection(descriptor) as connection:
        if port is None or connection.getsockname()[1] == port:
            connection.shutdown(SHUT_RDWR)
