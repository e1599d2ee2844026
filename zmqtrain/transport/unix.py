"""The transport between processes of one host: stream sockets in the file system (unix(7)).

Each process reads and writes them on its own event loop. ZeroMQ passes each message through a
thread, so that a push and its answer wake six threads; here they wake two.

Each end asks the kernel for the user at the other end, and serves only its own user.
Besides, only the owner of a socket's file can connect to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
from collections.abc import Sequence
from errno import EADDRINUSE, EAGAIN, ECONNREFUSED, ENOENT
from functools import partial
from pathlib import Path

from zmqtrain.errors import ConfigError
from zmqtrain.transport.base import (
    HIGH_WATER_MARK,
    OnFailure,
    OnMessage,
    RoutingId,
    UnreachableError,
    ignore_failure,
)
from zmqtrain.transport.stream import LOOK_S, Connection
from zmqtrain.wire.buffers import Buffer

SCHEMES = ("ipc://", "unix://")
RECONNECT_S = 0.1
MAX_PATH_NBYTES = 107  # of sockets on Linux
_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group

log = logging.getLogger(__name__)


class UnixPeer(Connection):
    """A connected endpoint. It connects again when its connection ends."""

    def __init__(self, address: str, place: str | None = None) -> None:
        """``place``: the name of the socket, unless it is the path in the address."""
        super().__init__(address, b"", HIGH_WATER_MARK, None)
        self._place = place or path_of(address)
        self._failure: tuple[str, bool] | None = None
        self._was_right = False  # there was a connection to a task of this user
        self._on_failure: OnFailure = ignore_failure
        self._connect()

    def on_failure(self, callback: OnFailure) -> None:
        self._on_failure = callback
        if self._failure:
            callback(*self._failure)

    def fail(self, text: str, *, is_final: bool = False) -> None:
        """Report why there is no connection; this is never final after an earlier connection."""
        self._failure = text, is_final and not self._was_right
        self._on_failure(*self._failure)

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
                end.connect(self._place)
            except OSError as error:
                if error.errno not in (ENOENT, ECONNREFUSED, EAGAIN):  # no listener yet
                    self.fail(f"it cannot be connected to: {error.strerror}")
                return
            if other := other_user(end):
                self.fail(
                    f"it belongs to {other}, and this task to user {os.geteuid()}; run both as one "
                    "user, or make keys (zmqtrain keys new) and give both --keys DIR",
                    is_final=True,
                )
                return
            undo.pop_all()
        self._failure, self._was_right = None, True
        self._socket = end
        self._attach()


class UnixListener:
    def __init__(self, address: str, high_water_mark: int, place: str | None = None) -> None:
        """``place``: the name of the socket, unless it is the path in the address.

        Raises:
            OSError: the address is taken, or cannot be used.
        """
        self.address = address
        self.connections: dict[RoutingId, Connection] = {}
        self._on_failure: OnFailure = ignore_failure
        self._high_water_mark = high_water_mark
        self._numbers = itertools.count(1)
        self._on_message: OnMessage | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._socket = listening_at(place or path_of(address))
        name = self._socket.getsockname()
        self._path = name if isinstance(name, str) else ""  # an abstract socket has no file
        self._file = os.stat(self._path) if self._path else None

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._accept_from_now_on()

    def on_failure(self, callback: OnFailure) -> None:
        """Call ``callback`` for every connection of another user, which is closed."""
        self._on_failure = callback

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
        self._remove_file()
        self._socket.close()
        for connection in self.connections.values():
            connection.close(discard=discard)

    def _remove_file(self) -> None:
        """Remove the socket's file, unless another listener has replaced it."""
        with contextlib.suppress(OSError):
            if self._file and os.path.samestat(os.stat(self._path), self._file):
                os.unlink(self._path)

    def _accept_from_now_on(self) -> None:
        if self._loop is not None:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            end, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left: try again later
            log.warning("%s: no new connection for now: %s", self.address, error.strerror)
            if self._loop is not None:
                self._loop.remove_reader(self._socket.fileno())
                self._timer = self._loop.call_later(LOOK_S, self._accept_from_now_on)
            return
        if other := other_user(end):
            end.close()
            self._on_failure(f"{other} of this host connected; only its own user may", False)
            return
        end.setblocking(False)
        name = b"%d" % next(self._numbers)
        for gone in [known for known, other in self.connections.items() if other.is_closed]:
            del self.connections[gone]
        connection = Connection(self.address, name, self._high_water_mark, end)
        self.connections[name] = connection
        if self._on_message is not None:
            connection.start(self._on_message)


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


def other_user(end: socket.socket) -> str:
    """Return the user at the other end of a Unix socket, "" for our own.

    Where the kernel does not report it, a socket is a file in this user's own directory.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return ""
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return "" if user == os.geteuid() else f"user {user}"


def listening_at(place: str) -> socket.socket:
    """Return a socket that listens at a path, or at an abstract name, which begins with NUL.

    Raises:
        OSError: the place is taken, or cannot be used.
    """
    is_file = not place.startswith("\0")
    with contextlib.ExitStack() as undo:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.callback(listening.close)
        listening.setblocking(False)
        if is_file and Path(place).is_socket():
            if _is_served(place):
                raise OSError(EADDRINUSE, os.strerror(EADDRINUSE))
            os.unlink(place)  # a ps that was killed has left it
        listening.bind(place)
        if is_file:
            undo.callback(partial(os.unlink, place))
            os.chmod(place, 0o600)
        listening.listen()
        undo.pop_all()
    return listening


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) not in (ECONNREFUSED, ENOENT)
