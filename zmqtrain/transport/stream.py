"""A connected stream socket that the event loop reads and writes, message by message."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Sequence

from zmqtrain.errors import ProtocolError
from zmqtrain.transport.base import COPIED_NBYTES, OnMessage, RoutingId, UnreachableError
from zmqtrain.transport.framing import MessageSplitter, heading
from zmqtrain.wire.buffers import Buffer

RECEIVED_NBYTES = 1 << 16  # in one read, except of large messages
WAITING_NBYTES = 1 << 18
"""For each message of the high-water mark; more messages may wait while they are small."""
LOOK_S = 1.0
LINGER_S = 2.0  # how long last replies may take to leave after close

log = logging.getLogger(__name__)


class Connection:
    """The listener's end of a connection: a socket and its unsent messages.

    The socket is checked once a second, since uvloop calls the reader of a reset socket only once,
    and not again for its unread bytes.
    """

    def __init__(
        self, address: str, name: RoutingId, high_water_mark: int, end: socket.socket | None
    ) -> None:
        self.address = address
        self.name = name
        self._high_water_mark = high_water_mark
        self._socket = end
        self._incoming = MessageSplitter()
        self._waiting: deque[list[Buffer]] = deque()  # messages; the first may have been begun
        self._waiting_nbytes = 0
        self._on_message: OnMessage | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._is_begun = False
        self._is_writing = False
        self._is_broken = False  # it cannot send any more, and has bytes to read
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
            sent = end.send(b"".join(message)) if nbytes <= COPIED_NBYTES else end.sendmsg(message)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._break()
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
        """After ``close``: send waiting messages, until this time of the monotonic clock."""
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
            self._loop.add_reader(self._socket.fileno(), self._read)
            self._write_later()

    def _not_sent(self, message: list[Buffer], error: OSError) -> None:
        raise UnreachableError(f"{self.address}: {error.strerror}") from None

    def _ended(self) -> None:
        """Handle an end of the connection, by the peer or because of an invalid message."""
        self.close(discard=True)

    def _drop(self) -> None:
        """Close the socket; a message sent in part is lost."""
        end, self._socket = self._socket, None
        if end is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(end.fileno())
                self._loop.remove_writer(end.fileno())
            end.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._is_begun:
            self._waiting_nbytes -= sum(map(len, self._waiting.popleft()))
        if self.is_closed:
            self._waiting.clear()
        self._is_begun = self._is_writing = self._is_broken = False
        self._incoming = MessageSplitter()

    # Sending

    def _keep(self, message: list[Buffer], sent: int = 0) -> None:
        if self.is_closed:
            raise UnreachableError(f"{self.address}: this end is closed")
        if len(self._waiting) >= self._high_water_mark and (
            self._socket is None or self._waiting_nbytes >= WAITING_NBYTES * self._high_water_mark
        ):
            raise UnreachableError(f"the queue to {self.address} is full")
        self._waiting_nbytes += sum(map(len, message)) - sent
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
        if end is None or self._loop is None or self._is_broken:
            return
        if self._waiting and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(end.fileno(), self._write)

    def _write(self) -> None:
        """Send the first waiting message as far as the socket accepts it."""
        end, message = self._socket, self._waiting[0]
        if end is None:
            return
        try:
            sent = end.sendmsg(message)
        except BlockingIOError:
            return
        except OSError:
            self._stop_writing(end)
            self._break()
            if self.is_closed:
                self._drop()
            return
        _take_off(message, sent)
        self._waiting_nbytes -= sent
        self._is_begun = bool(message)
        if not message:
            self._waiting.popleft()
        if not self._waiting:
            self._stop_writing(end)
            if self.is_closed:
                self._drop()

    def _break(self) -> None:
        """Send nothing more; read up to the end of the stream."""
        self._is_broken = True
        self._read_soon()

    def _stop_writing(self, end: socket.socket) -> None:
        if self._is_writing and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_writer(end.fileno())
        self._is_writing = False

    # Receiving

    def _look(self) -> None:
        if self._loop is not None:
            self._timer = self._loop.call_later(LOOK_S, self._look)
            self._read_soon()

    def _read_soon(self) -> None:
        """Read on the next turns of the loop until nothing is left."""
        if self._soon is None and self._loop is not None and not self.is_closed:
            self._soon = self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._soon = None
        self._read(onwards=True)

    def _read(self, *, onwards: bool = False) -> None:
        """Handle one message; further ones wait for later turns, after the loop's other work."""
        if self._soon is not None:
            return
        try:
            # Complete messages come first: the socket may not become readable again.
            message = (self._incoming.next() if onwards else None) or self._receive()
        except BlockingIOError:
            return
        except ProtocolError as error:
            log.warning("%s: a connection was closed because it sent %s", self.address, str(error))
            self._ended()
            return
        except (OSError, EOFError):
            self._ended()
            return
        if onwards or self._incoming.has_more:
            self._read_soon()
        if message is not None and self._on_message is not None:
            self._on_message(self.name, message)

    def _receive(self) -> list[Buffer] | None:
        """Receive some bytes; return a message if they complete one.

        Raises:
            BlockingIOError: there are no bytes.
            OSError, EOFError: the other end has closed the connection, and all was read.
            ProtocolError: the bytes are not a message.
        """
        if self._socket is None:
            raise BlockingIOError
        room = self._incoming.room
        if room is not None:
            nbytes = self._socket.recv_into(room)
            self._incoming.fill(nbytes)
        else:
            data = self._socket.recv(RECEIVED_NBYTES)
            if message := self._incoming.whole(data):
                return message
            nbytes = len(data)
            self._incoming.add(data)
        if not nbytes:
            raise EOFError
        return self._incoming.next()


def _take_off(parts: list[Buffer], nbytes: int) -> None:
    """Remove ``nbytes`` from the front of a message."""
    while parts and nbytes >= len(parts[0]):
        nbytes -= len(parts.pop(0))
    if nbytes:
        parts[0] = memoryview(parts[0])[nbytes:]
