"""The shortcut past ZeroMQ: a Unix socket between a ps and a worker of its host.

In each process a thread of ZeroMQ takes every message over and hands it on, so a push and its
answer wake six threads; by the shortcut they wake two. It keeps the contract of an endpoint for
messages that fit. All others go by ZeroMQ.

The socket has an abstract name (unix(7)), which ends with its process and leaves no file behind,
and takes in processes of the same user only. There is none on systems other than Linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from errno import EACCES
from functools import partial

from zmqtrain.transport.base import (
    OnMessage,
    OnTrouble,
    RoutingId,
    UnreachableError,
    ignore_trouble,
)
from zmqtrain.wire.buffers import Buffer

MAX_NBYTES = 32768
"""Of a message that fits; a push whose gradient does not travel has some hundred."""

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
_ADDRESS = "\0zmqtrain-{}"  # the zero byte makes it abstract


def fits(frames: Sequence[Buffer]) -> bool:
    """Say whether a message can go by a shortcut."""
    return len(frames) == 1 and len(frames[0]) <= MAX_NBYTES


class ShortcutEndpoint:
    """The worker's end. It does not outlive a connection: whoever made it makes another one."""

    def __init__(self, name: str) -> None:
        """Connect to the listener of this name.

        Raises:
            UnreachableError: there is none, or it is another user's.
        """
        self.address = f"the shortcut {name}"
        self._on_trouble: OnTrouble = ignore_trouble
        self._connection = _Connection(_opened(self.address, lambda end: _connect(end, name)))

    def start(self, on_message: OnMessage) -> None:
        self._connection.start(lambda frames: on_message(b"", frames), self._ended)

    def tell(self, on_trouble: OnTrouble) -> None:
        self._on_trouble = on_trouble

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        self._connection.send(frames)

    def close(self, *, discard: bool = False) -> None:
        self._connection.close()

    def _ended(self) -> None:
        self._on_trouble(f"{self.address} has ended", True)


class ShortcutListener:
    """The end of a ps, for all workers that come."""

    def __init__(self, name: str) -> None:
        """Listen under a name.

        Raises:
            UnreachableError: another process does, or this system has no such sockets.
        """
        self.address = f"the shortcut {name}"
        self._connections: dict[RoutingId, _Connection] = {}
        self._numbers = itertools.count(1)
        self._on_message: OnMessage
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket = _opened(self.address, lambda end: _listen(end, name))

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        connection = self._connections.get(peer)
        if connection is None:
            raise UnreachableError(f"{self.address}: that worker has gone")
        if not fits(frames):
            self._drop(peer)  # it will ask again, by ZeroMQ
            raise UnreachableError(f"{self.address} takes messages up to {MAX_NBYTES} B")
        connection.send(frames)

    def close(self, *, discard: bool = False) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._socket.close()
        for peer in tuple(self._connections):
            self._drop(peer)

    def _accept(self) -> None:
        try:
            end, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("workers push by ZeroMQ from now on: %s", error)
            self.close()  # or they would push into connections that nobody accepts
            return
        if not _is_ours(end):
            end.close()
            return
        end.setblocking(False)
        peer = b"%d" % next(self._numbers)
        connection = self._connections[peer] = _Connection(end)
        take = partial(self._on_message, peer)
        connection.start(take, lambda: self._drop(peer))

    def _drop(self, peer: RoutingId) -> None:
        connection = self._connections.pop(peer, None)
        if connection is not None:
            connection.close()


class _Connection:
    """One connected socket; it reads a message whenever the event loop finds one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Callable[[list[Buffer]], None]
        self._ended: Callable[[], None]

    def start(self, take: Callable[[list[Buffer]], None], ended: Callable[[], None]) -> None:
        self._take, self._ended = take, ended
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def send(self, frames: Sequence[Buffer]) -> None:
        try:
            self._socket.send(frames[0])
        except OSError as error:
            if self._loop is not None and not isinstance(error, BlockingIOError):
                self.close()  # the loop may tell of an end no more that was met here
                self._ended()
            raise UnreachableError(f"the shortcut: {error.strerror}") from None

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._socket.close()

    def _read(self) -> None:
        """Take one message, or the end; of an end that broke off, all that had come before."""
        is_broken = False
        while self._loop is not None:
            try:
                message = self._socket.recv(MAX_NBYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:  # told once, before what the other end had sent
                is_broken = True
                continue
            except OSError:
                message = b""
            if not message:
                self.close()
                self._ended()
                return
            self._take([message])
            if not is_broken:
                return


def _opened(address: str, use: Callable[[socket.socket], None]) -> socket.socket:
    """Return a new socket that is in use.

    Raises:
        UnreachableError: it cannot be.
    """
    if sys.platform != "linux":
        raise UnreachableError(f"{address}: this system has no abstract names")
    with contextlib.ExitStack() as undo:
        try:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(end.close)
            end.setblocking(False)
            use(end)
        except OSError as error:
            raise UnreachableError(f"{address}: {error.strerror}") from None
        undo.pop_all()
    return end


def _connect(end: socket.socket, name: str) -> None:
    end.connect(_ADDRESS.format(name))
    if not _is_ours(end):
        raise PermissionError(EACCES, "it is another user's")


def _listen(end: socket.socket, name: str) -> None:
    end.bind(_ADDRESS.format(name))
    end.listen()


def _is_ours(end: socket.socket) -> bool:
    """Say whether the process at the other end is this user's."""
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
