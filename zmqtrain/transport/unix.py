"""The transport between processes of one host: stream sockets in the file system (unix(7)).

Each process reads and writes them on its own event loop. ZeroMQ hands a message to a thread and
back in each process, so that a push and its answer wake six threads; here they wake two.

Who may come is the file system's business: a socket can be connected to by its owner alone, and
it should lie in a directory of theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from errno import EADDRINUSE, EAGAIN, ECONNREFUSED, ENOENT
from functools import partial
from pathlib import Path

from zmqtrain.errors import ConfigError, ProtocolError
from zmqtrain.transport.base import (
    COPIED_NBYTES,
    HIGH_WATER_MARK,
    OnFailure,
    OnMessage,
    RoutingId,
    UnreachableError,
    ignore_failure,
)
from zmqtrain.transport.framing import Incoming, heading
from zmqtrain.wire.buffers import Buffer

SCHEMES = ("ipc://", "unix://")
RECEIVED_NBYTES = 1 << 16  # at once, of what is no large message
RECONNECT_S = 0.1
LOOK_S = 1.0
LINGER_S = 2.0  # how long last replies may take to leave after close
MAX_PATH_NBYTES = 107  # of sockets on Linux

log = logging.getLogger(__name__)


class Connection:
    """One socket and what waits to be sent by it: the listener's end of a connection.

    A socket is looked at once a second even if the event loop is silent: uvloop calls the reader of
    one that was reset a single time, and not again for what is still to be read.
    """

    def __init__(
        self, address: str, name: RoutingId, high_water_mark: int, end: socket.socket | None
    ) -> None:
        self.address = address
        self.name = name
        self._high_water_mark = high_water_mark
        self._socket = end
        self._incoming = Incoming()
        self._waiting: deque[list[Buffer]] = deque()  # messages; the first may have been begun
        self._on_message: OnMessage | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._is_begun = False
        self._is_writing = False
        self.is_closed = False

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._attach()
        self._look()

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        message = [heading(frames), *frames]
        end = self._socket
        if self._waiting or end is None:
            self._keep(message)
            return
        nbytes = sum(map(len, message))
        try:
            if nbytes <= COPIED_NBYTES:
                sent = end.send(b"".join(message))
            else:
                sent = end.sendmsg(message)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._read_soon()  # and find the end behind what has come before it
            self._not_sent(message, error)
            return
        if sent < nbytes:
            self._keep(message, sent)

    def close(self, *, discard: bool = False) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._on_message = None
        if self._soon is not None:
            self._soon.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if discard or self._loop is None or self._socket is None or not self._waiting:
            self._drop()
        else:
            self._loop.remove_reader(self._socket.fileno())
            self._timer = self._loop.call_later(LINGER_S, self._drop)

    def finish(self, until: float) -> None:
        """After ``close``: wait for what is still to be sent, up to a time of the monotonic
        clock."""
        while self._socket is not None:
            left_s = until - time.monotonic()
            ready = select.poll()
            ready.register(self._socket, select.POLLOUT)
            if left_s <= 0 or not ready.poll(1000 * left_s):
                self._drop()
            else:
                self._write()

    def _attach(self) -> None:
        if self._loop is not None and self._socket is not None:
            self._loop.add_reader(self._socket.fileno(), self._on_readable)
            self._write_later()

    def _not_sent(self, message: list[Buffer], error: OSError) -> None:
        raise UnreachableError(f"{self.address}: {error.strerror}") from None

    def _ended(self) -> None:
        """The other end has closed the connection, or what it sends is no message."""
        self.close(discard=True)

    def _drop(self) -> None:
        """Give the socket up, with what was sent in part."""
        end, self._socket = self._socket, None
        if end is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(end.fileno())
                self._loop.remove_writer(end.fileno())
            end.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._is_begun:
            self._waiting.popleft()
        if self.is_closed:
            self._waiting.clear()
        self._is_begun = self._is_writing = False
        self._incoming = Incoming()

    # Sending

    def _keep(self, message: list[Buffer], sent: int = 0) -> None:
        if self.is_closed:
            raise UnreachableError(f"{self.address}: this end is closed")
        if len(self._waiting) >= self._high_water_mark:
            raise UnreachableError(f"the queue to {self.address} is full")
        parts = [
            bytes(part) if len(part) <= COPIED_NBYTES else memoryview(part) for part in message
        ]
        self._waiting.append(parts)
        if sent:
            self._is_begun = True
            _take_off(parts, sent)
        self._write_later()

    def _write_later(self) -> None:
        end = self._socket
        if self._waiting and not self._is_writing and self._loop is not None and end is not None:
            self._is_writing = True
            self._loop.add_writer(end.fileno(), self._write)

    def _write(self) -> None:
        """Send what the socket takes of the first message that waits."""
        end, message = self._socket, self._waiting[0]
        if end is None:
            return
        try:
            _take_off(message, end.sendmsg(message))
        except BlockingIOError:
            return
        except OSError:
            self._stop_writing(end)
            self._read_soon()
            if self.is_closed:
                self._drop()
            return
        self._is_begun = bool(message)
        if not message:
            self._waiting.popleft()
        if not self._waiting:
            self._stop_writing(end)
            if self.is_closed:
                self._drop()

    def _stop_writing(self, end: socket.socket) -> None:
        if self._is_writing and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_writer(end.fileno())
        self._is_writing = False

    # Receiving

    def _look(self) -> None:
        if self._loop is not None:
            self._timer = self._loop.call_later(LOOK_S, self._look)
            self._read_soon()

    def _on_readable(self) -> None:
        if self._soon is None:
            self._read(onwards=False)

    def _read_soon(self) -> None:
        """Read on a later turn of the loop, and on those after it until nothing has come."""
        if self._soon is None and self._loop is not None and not self.is_closed:
            self._soon = self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._soon = None
        self._read(onwards=True)

    def _read(self, *, onwards: bool) -> None:
        """Take one message; others that have come with it leave turns to the loop's other work."""
        try:
            message = self._incoming.next()
            if message is None:
                self._receive()
                message = self._incoming.next()
        except BlockingIOError:
            return
        except ProtocolError as error:
            log.warning("%s: a connection is closed, for it brought %s", self.address, str(error))
            self._ended()
            return
        except (OSError, EOFError):
            self._ended()
            return
        if onwards or self._incoming.has_more:
            self._read_soon()
        if message is not None and self._on_message is not None:
            self._on_message(self.name, message)

    def _receive(self) -> None:
        """Take in some of what has come.

        Raises:
            BlockingIOError: nothing has.
            OSError, EOFError: the other end has closed the connection, and all of it was read.
        """
        if self._socket is None:
            raise BlockingIOError
        room = self._incoming.room
        if room is not None:
            nbytes = self._socket.recv_into(room)
            self._incoming.fill(nbytes)
        else:
            data = self._socket.recv(RECEIVED_NBYTES)
            nbytes = len(data)
            self._incoming.add(data)
        if not nbytes:
            raise EOFError


class UnixPeer(Connection):
    """A connected endpoint. It connects again whenever its connection has ended."""

    def __init__(self, address: str) -> None:
        super().__init__(address, b"", HIGH_WATER_MARK, None)
        self._path = path_of(address)
        self._failure = ""
        self._on_failure: OnFailure = ignore_failure
        self._connect()

    def on_failure(self, callback: OnFailure) -> None:
        self._on_failure = callback
        if self._failure:
            callback(self._failure, False)

    def _not_sent(self, message: list[Buffer], error: OSError) -> None:
        self._keep(message)

    def _ended(self) -> None:
        self._drop()
        if self._loop is not None:
            self._timer = self._loop.call_later(RECONNECT_S, self._look)

    def _look(self) -> None:
        if self._socket is None and not self.is_closed:
            self._connect()
        if self._loop is not None and not self.is_closed:
            pause_s = RECONNECT_S if self._socket is None else LOOK_S
            self._timer = self._loop.call_later(pause_s, self._look)
            self._read_soon()

    def _connect(self) -> None:
        with contextlib.ExitStack() as undo:
            try:
                end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                undo.callback(end.close)
                end.setblocking(False)
                end.connect(self._path)
            except OSError as error:
                if error.errno not in (ENOENT, ECONNREFUSED, EAGAIN):  # nobody listens, as yet
                    self._failure = f"it cannot be connected to: {error.strerror}"
                    self._on_failure(self._failure, False)
                return
            undo.pop_all()
        self._failure = ""
        self._socket = end
        self._attach()


class UnixListener:
    """A listening endpoint."""

    def __init__(self, address: str, high_water_mark: int) -> None:
        """Raises OSError if the address is taken, or cannot be used."""
        self.address = address
        self.connections: dict[RoutingId, Connection] = {}
        self._path = path_of(address)
        self._high_water_mark = high_water_mark
        self._numbers = itertools.count(1)
        self._on_message: OnMessage | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._socket = _listen(self._path)
        self._file = os.stat(self._path)

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._accept_from_now_on()

    def on_failure(self, callback: OnFailure) -> None:
        """Nobody is refused here: who may not come gets no connection."""

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        connection = self.connections.get(peer)
        if connection is None or connection.is_closed:
            raise UnreachableError(f"{self.address}: that peer is not connected")
        connection.send(frames)

    def close(self, *, discard: bool = False) -> None:
        if self._socket.fileno() < 0:
            return
        self._on_message = None
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._path), self._file):
                os.unlink(self._path)
        self._socket.close()
        for connection in self.connections.values():
            connection.close(discard=discard)

    def _accept_from_now_on(self) -> None:
        if self._loop is not None:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            end, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left: try again later, and not in a circle
            log.warning("%s: nobody new can connect for now: %s", self.address, error.strerror)
            if self._loop is not None:
                self._loop.remove_reader(self._socket.fileno())
                self._timer = self._loop.call_later(LOOK_S, self._accept_from_now_on)
            return
        end.setblocking(False)
        name = b"%d" % next(self._numbers)
        for gone in [known for known, other in self.connections.items() if other.is_closed]:
            del self.connections[gone]
        connection = Connection(self.address, name, self._high_water_mark, end)
        self.connections[name] = connection
        if self._on_message is not None:
            connection.start(self._on_message)


class UnixTransport:
    """Makes endpoints at ``unix:///path/to/socket``, which may be written ``ipc://``."""

    def __init__(self, linger_s: float = LINGER_S) -> None:
        """``linger_s``: how long ``close`` may take to send what is still to be sent."""
        self._linger_s = linger_s
        self._listeners: set[UnixListener] = set()
        self._peers: set[UnixPeer] = set()

    def bind(self, address: str, high_water_mark: int = HIGH_WATER_MARK) -> UnixListener:
        try:
            listener = UnixListener(address, high_water_mark)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"cannot listen at {address}: {reason}. Another ps may be running there; "
                "end it, or choose another address (--ps)"
            ) from None
        self._listeners.add(listener)
        return listener

    def connect(self, address: str) -> UnixPeer:
        peer = UnixPeer(address)
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        until = time.monotonic() + self._linger_s
        for listener in self._listeners:
            listener.close()
        for peer in self._peers:
            peer.close()
        served = (listener.connections.values() for listener in self._listeners)
        for connection in itertools.chain(self._peers, *served):
            connection.finish(until)
        self._listeners.clear()
        self._peers.clear()


def path_of(address: str) -> str:
    """Return the path in an address.

    Raises:
        ConfigError: it is too long for a socket.
    """
    path = address.partition("://")[2]
    if len(os.fsencode(path)) > MAX_PATH_NBYTES:
        raise ConfigError(
            f"{address}: its path is longer than the {MAX_PATH_NBYTES} bytes that a Unix socket's "
            "may have; choose a shorter one"
        )
    return path


def _listen(path: str) -> socket.socket:
    with contextlib.ExitStack() as undo:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.callback(listening.close)
        listening.setblocking(False)
        if Path(path).is_socket():
            if _is_served(path):
                raise OSError(EADDRINUSE, os.strerror(EADDRINUSE))
            os.unlink(path)  # a ps that was killed has left it
        listening.bind(path)
        undo.callback(partial(os.unlink, path))
        os.chmod(path, 0o600)
        listening.listen()
        undo.pop_all()
    return listening


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) not in (ECONNREFUSED, ENOENT)


def _take_off(parts: list[Buffer], nbytes: int) -> None:
    """Remove so many bytes from the front of a message."""
    while parts and nbytes >= len(parts[0]):
        nbytes -= len(parts.pop(0))
    if nbytes:
        parts[0] = memoryview(parts[0])[nbytes:]
