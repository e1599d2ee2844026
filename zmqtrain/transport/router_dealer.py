"""The ZeroMQ transport: ROUTER listens, DEALER connects.

Sockets are read from the event loop's file-descriptor callback rather than through zmq.asyncio: a
message costs no future, no task switch and no timer. ZMQ_FD is edge-triggered and signals only that
"something" happened, so the socket is drained until it is empty, its events are checked after every
send, and a watchdog checks it once a second in case an edge was missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
from collections.abc import Sequence
from functools import cache, partial

import zmq

from zmqtrain.errors import ConfigError
from zmqtrain.transport.authenticator import ADDRESS as ZAP_ADDRESS
from zmqtrain.transport.authenticator import Authenticator
from zmqtrain.transport.base import (
    COPIED_NBYTES,
    HIGH_WATER_MARK,
    OnFailure,
    OnMessage,
    RoutingId,
    UnreachableError,
    cannot_listen,
)
from zmqtrain.transport.curve import public_of, secure_listener, secure_peer
from zmqtrain.transport.framing import MAX_FRAME_NBYTES
from zmqtrain.transport.handshake import PeerWatch, watch
from zmqtrain.transport.registry import KnownPeer, Registry
from zmqtrain.transport.security import Security
from zmqtrain.wire.buffers import Buffer

BURST = 32  # messages handled before the loop's other work gets a turn
WATCHDOG_S = 1.0
LINGER_MS = 2000  # how long last replies may take to leave after close
# Plain numbers: the enumerations of pyzmq cost microseconds a call.
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)

HANDSHAKE_MS = 10_000
UNHEARD_MS = 10_000  # twice the usual lease; then a connection without traffic is given up

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


class ZmqEndpoint:
    """One socket on the running event loop; ``ZmqTransport`` makes them."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        address: str,
        *,
        listening: bool,
        monitor: Authenticator | PeerWatch | None = None,
    ) -> None:
        """``monitor`` is closed with the endpoint."""
        self.address = address
        self._socket = socket
        self._listening = listening
        self._authenticator = monitor if isinstance(monitor, Authenticator) else None
        self._monitor = monitor
        self._on_message: OnMessage | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._drain_soon: asyncio.Handle | None = None
        self._is_draining = False

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._watch()
        if self._monitor is not None:
            self._monitor.start()

    def on_failure(self, callback: OnFailure) -> None:
        if self._monitor is not None:
            self._monitor.on_failure(callback)

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        socket = self._socket
        try:
            if self._listening:
                if type(peer) is KnownPeer and not peer.key.allowed:
                    raise UnreachableError(f"the key of {peer.key.owner} is no longer allowed")
                socket.send(peer, _MORE)
            for frame in frames[:-1]:
                socket.send(frame, _MORE, copy=len(frame) <= COPIED_NBYTES)
            socket.send(frames[-1], _NOW, copy=len(frames[-1]) <= COPIED_NBYTES)
        except zmq.Again:
            raise UnreachableError(f"the queue to {self.address} is full") from None
        except zmq.ZMQError as error:
            raise UnreachableError(f"{self.address}: {error}") from None
        # A send handles the socket's internal commands and may swallow the edge of ZMQ_FD.
        if self._loop is not None and not self._is_draining and self._is_readable():
            self._schedule_drain()

    def close(self, *, discard: bool = False) -> None:
        if self._socket.closed:
            return
        self._on_message = None
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        for handle in (self._watchdog, self._drain_soon):
            if handle is not None:
                handle.cancel()
        if self._monitor is not None:
            self._socket.disable_monitor()  # first: it would wait for the reader of its events
            self._monitor.close()
        self._socket.close(linger=0 if discard else None)

    def _watch(self) -> None:
        if self._loop is not None:
            self._watchdog = self._loop.call_later(WATCHDOG_S, self._watch)
            self._schedule_drain()

    def _schedule_drain(self) -> None:
        if self._drain_soon is None and self._loop is not None:
            self._drain_soon = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._drain_soon is not None:
            self._drain_soon.cancel()  # or each call by the reader would add a burst to all turns
            self._drain_soon = None
        if self._is_draining:
            return
        self._is_draining = True
        try:
            for _ in range(BURST):
                if self._on_message is None:
                    return
                message = self._receive()
                if message is not None:
                    self._on_message(*message)
                if self._socket.closed or not self._is_readable():
                    return
        except zmq.Again:
            return
        finally:
            self._is_draining = False
        self._schedule_drain()

    def _is_readable(self) -> bool:
        return bool(int(self._socket.get(_EVENTS)) & _READABLE)

    def _receive(self) -> tuple[RoutingId, list[Buffer]] | None:
        """Receive a message, with tensor frames where zmq put them; None: it is dropped."""
        socket = self._socket
        peer = socket.recv(_NOW) if self._listening else b""
        first = frame = socket.recv(_NOW, copy=False)
        received: list[Buffer] = [frame.bytes]
        while frame.more:
            frame = socket.recv(_NOW, copy=False)
            received.append(frame.buffer)
        if self._authenticator is None:
            return peer, received
        known = self._authenticator.identify(peer, first)
        return None if known is None else (known, received)


class ZmqTransport:
    """Makes sockets in one ZeroMQ context of its own; with keys, one of them may listen."""

    def __init__(self, security: Security | None = None, linger_ms: int = LINGER_MS) -> None:
        """``security`` needs keys or must be insecure: libzmq does not identify users."""
        self._security = security or Security()
        self._linger_ms = linger_ms
        _keep_freed_memory()
        self._context = zmq.Context()
        self._endpoints: list[ZmqEndpoint] = []

    def bind(self, address: str, high_water_mark: int = HIGH_WATER_MARK) -> ZmqEndpoint:
        self._security.check(address, listening=True)
        if not self._security.is_keyed(address):
            log.warning(
                "%s is open (--insecure): anyone who can connect to it, including every user of "
                "this host, may read, change and stop the job",
                address,
            )
        with contextlib.ExitStack() as undo:
            socket = self._socket(zmq.ROUTER, address)
            undo.callback(socket.close, linger=0)
            socket.set(zmq.SNDHWM, high_water_mark)
            socket.set(zmq.ROUTER_MANDATORY, 1)
            monitor = self._authenticator(socket) if self._security.is_keyed(address) else None
            if monitor is not None:
                undo.callback(monitor.close)
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                raise cannot_listen(address, zmq.strerror(error.errno or 0)) from None
            undo.pop_all()
        bound = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return self._kept(ZmqEndpoint(socket, bound, listening=True, monitor=monitor))

    def connect(self, address: str) -> ZmqEndpoint:
        security = self._security
        security.check(address, listening=False)
        with contextlib.ExitStack() as undo:
            socket = self._socket(zmq.DEALER, address)
            undo.callback(socket.close, linger=0)
            public = ""
            if security.is_keyed(address):
                secret = security.secret()
                public = public_of(secret).hex()
                secure_peer(socket, secret, security.server_key(address))
            reconnect = partial(_reconnect, socket, address)
            monitor = PeerWatch(self._events_of(socket), address, security, public, reconnect)
            undo.callback(monitor.close)
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"cannot connect to {address}: {zmq.strerror(error.errno or 0)}; expected "
                    "host:port"
                ) from None
            undo.pop_all()
        return self._kept(ZmqEndpoint(socket, address, listening=False, monitor=monitor))

    def close(self) -> None:
        while self._endpoints:
            self._endpoints.pop().close()
        self._context.term()

    def _authenticator(self, socket: zmq.Socket[bytes]) -> Authenticator:
        """Make a socket admit only holders of allowed keys."""
        registry = Registry(self._security.keys())
        secure_listener(socket, self._security.secret())
        questions = self._context.socket(zmq.ROUTER)
        questions.set(zmq.LINGER, 0)
        questions.bind(ZAP_ADDRESS)
        zap = ZmqEndpoint(questions, ZAP_ADDRESS, listening=True)
        return Authenticator(registry, zap, self._events_of(socket))

    def _events_of(self, socket: zmq.Socket[bytes]) -> ZmqEndpoint:
        return ZmqEndpoint(watch(socket, self._context), "", listening=False)

    def _kept(self, endpoint: ZmqEndpoint) -> ZmqEndpoint:
        self._endpoints = [each for each in self._endpoints if not each.closed] + [endpoint]
        return endpoint

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if "[" in address:
            socket.set(zmq.IPV6, 1)
        socket.set(zmq.LINGER, self._linger_ms)
        socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        socket.set(zmq.RECONNECT_IVL, 100)
        socket.set(zmq.RECONNECT_IVL_MAX, 500)
        socket.set(zmq.CONNECT_TIMEOUT, 5000)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # Without it a cut link stays dead twice as long, since TCP doubles its pauses.
        with contextlib.suppress(zmq.ZMQError):  # some systems lack it
            socket.set(zmq.TCP_MAXRT, UNHEARD_MS)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, 60)
        return socket


def _reconnect(socket: zmq.Socket[bytes], address: str) -> None:
    """Have libzmq connect again after a refusal, at which it gives up."""
    socket.disconnect(address)
    socket.connect(address)


@cache
def _keep_freed_memory() -> None:
    """Have glibc keep the memory of received frames for the next ones.

    By default it returns free memory beyond 2 MiB, and the kernel clears each page again: with
    100 MB that is a tenth of a step. These are the limits of its own dynamic adjustment.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return  # as the user wants it
    with contextlib.suppress(AttributeError):  # no glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)
