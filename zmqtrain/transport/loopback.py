"""The transport between the tasks of one user on one host, at loopback addresses, without keys.

Any user of the host can connect to a port, and TCP does not identify them. So messages use a Unix
socket named after the address, where the kernel identifies the user at the other end. The port is
bound nevertheless, as a signpost: no two tasks share an address, and an end that connects to it
learns by ZeroMQ's protocol that it will not be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time

from zmqtrain.transport.base import OnMessage
from zmqtrain.transport.greeting import UNIX, greeting, mechanism_at, reason
from zmqtrain.transport.own_directory import for_small_files
from zmqtrain.transport.unix import UnixListener, UnixPeer

ASK_S = 0.5  # between two inquiries at a port that has no socket


class LoopbackPeer(UnixPeer):
    def __init__(self, address: str) -> None:
        super().__init__(address, place_of(address))
        self._ask_at = 0.0
        self._heard: str | None = None  # mechanism in the port's last greeting
        self._inquiry: asyncio.Task[None] | None = None

    def close(self, *, discard: bool = False) -> None:
        if self._inquiry is not None:
            self._inquiry.cancel()
        super().close(discard=discard)

    def _look(self) -> None:
        super()._look()
        if self._socket is not None or self.is_closed or time.monotonic() < self._ask_at:
            return
        self._ask_at = float("inf")
        self._inquiry = asyncio.get_running_loop().create_task(self._inquire())

    async def _inquire(self) -> None:
        """Find the holder of the port; two equal answers count, since a task may start or end."""
        heard, self._heard = self._heard, await mechanism_at(self.address, UNIX)
        if self._socket is None and self._heard is not None and self._heard == heard:
            self.fail(reason(UNIX, self._heard), is_final=True)
        self._ask_at = time.monotonic() + ASK_S


class LoopbackListener(UnixListener):
    """A listening endpoint, and its signpost."""

    def __init__(self, address: str, high_water_mark: int) -> None:
        """Raises OSError if the address is taken, or cannot be used."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        family = socket.AF_INET6 if "[" in host else socket.AF_INET
        with contextlib.ExitStack() as undo:
            self._signpost = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            self._signpost.setblocking(False)
            self._signpost.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._signpost.bind((host.strip("[]"), int(port)))
            named = f"tcp://{host}:{self._signpost.getsockname()[1]}"
            super().__init__(named, high_water_mark, place_of(named))
            undo.callback(self._socket.close)
            self._signpost.listen()  # after the socket, which peers then find as well
            undo.pop_all()

    def start(self, on_message: OnMessage) -> None:
        super().start(on_message)
        asyncio.get_running_loop().add_reader(self._signpost.fileno(), self._turn_away)

    def close(self, *, discard: bool = False) -> None:
        if self._loop is not None and self._signpost.fileno() >= 0:
            self._loop.remove_reader(self._signpost.fileno())
        self._signpost.close()
        super().close(discard=discard)

    def _turn_away(self) -> None:
        """Greet and close one connection, so that it keeps no descriptor."""
        with contextlib.suppress(OSError):
            end, _ = self._signpost.accept()
            with end:
                end.setblocking(False)
                end.send(greeting(UNIX))
                end.shutdown(socket.SHUT_WR)


def place_of(address: str, platform: str = sys.platform) -> str:
    """Return the name of the Unix socket for a loopback address.

    Linux has abstract names, which do not depend on the directories that a task sees. On other
    systems it is a file in this user's own directory.

    Raises:
        ConfigError: that directory belongs to another user.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    if platform == "linux":
        return f"\0zmqtrain/{host}:{port}"
    return str(for_small_files() / f"{host}-{port}.sock")
