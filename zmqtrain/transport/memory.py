"""The in-process transport, without a socket. Messages still pass the codec."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence

from zmqtrain.errors import ConfigError
from zmqtrain.transport.base import (
    HIGH_WATER_MARK,
    OnFailure,
    OnMessage,
    RoutingId,
    UnreachableError,
)
from zmqtrain.wire.buffers import Buffer

BURST = 32  # messages handled before the loop's other work gets a turn


class MemoryEndpoint:
    """One end; ``MemoryTransport`` makes them."""

    def __init__(self, hub: MemoryTransport, address: str, name: RoutingId = b"") -> None:
        self._hub = hub
        self._name = name  # how the listener addresses this end; b"" for the listener itself
        self.address = address
        self._on_message: OnMessage | None = None
        self._is_closed = False
        self._is_draining = False
        self._received: deque[tuple[RoutingId, list[Buffer]]] = deque()
        self._waiting: list[list[Buffer]] = []

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        if not self._name:
            self._hub.listening(self.address)
        self._drain_soon()

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        if self._is_closed:
            raise UnreachableError(f"this end of {self.address} is closed")
        copy: list[Buffer] = [bytes(frame) for frame in frames]
        if not self._name:
            if (end := self._hub.ends.get(peer)) is None:
                raise UnreachableError(f"peer {peer!r} is not connected")
            end.deliver(b"", copy)
        elif not self._hub.forward(self.address, self._name, copy):
            if len(self._waiting) >= HIGH_WATER_MARK:
                raise UnreachableError(f"{HIGH_WATER_MARK} messages wait for {self.address}")
            self._waiting.append(copy)

    def deliver(self, peer: RoutingId, frames: list[Buffer]) -> None:
        """Queue a message; it is delivered on a later turn of the loop, as from a socket."""
        self._received.append((peer, frames))
        self._drain_soon()

    def flush(self) -> None:
        """Send the messages kept while there was no listener."""
        waiting, self._waiting = self._waiting, []
        for frames in waiting:
            self._hub.forward(self.address, self._name, frames)

    def on_failure(self, callback: OnFailure) -> None:
        """Do nothing: no connection is refused within a process."""

    def close(self, *, discard: bool = False) -> None:
        """Nothing waits to be sent, with ``discard`` or without."""
        self._is_closed = True
        self._on_message = None
        self._received.clear()
        self._waiting.clear()
        self._hub.closed(self, self._name)

    def _drain_soon(self) -> None:
        if self._on_message is not None and self._received and not self._is_draining:
            self._is_draining = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        self._is_draining = False
        for _ in range(min(BURST, len(self._received))):
            if self._on_message is not None and self._received:
                self._on_message(*self._received.popleft())
        self._drain_soon()


class MemoryTransport:
    """Connects its endpoints by their addresses."""

    def __init__(self) -> None:
        self._listeners: dict[str, MemoryEndpoint] = {}
        self._started: set[str] = set()
        self.ends: dict[RoutingId, MemoryEndpoint] = {}  # connected, by name
        self._numbers = itertools.count(1)

    def bind(self, address: str, high_water_mark: int = HIGH_WATER_MARK) -> MemoryEndpoint:
        if address.endswith(":0"):
            address = f"{address[:-1]}{49152 + next(self._numbers)}"
        if address in self._listeners:
            raise ConfigError(f"{address} is in use: give each ps an address of its own")
        endpoint = self._listeners[address] = MemoryEndpoint(self, address)
        return endpoint

    def connect(self, address: str) -> MemoryEndpoint:
        name = b"%d" % next(self._numbers)
        endpoint = self.ends[name] = MemoryEndpoint(self, address, name)
        return endpoint

    def close(self) -> None:
        for endpoint in [*self.ends.values(), *self._listeners.values()]:
            endpoint.close()

    def listening(self, address: str) -> None:
        """Deliver the messages that peers sent before the listener started."""
        self._started.add(address)
        for endpoint in self.ends.values():
            if endpoint.address == address:
                endpoint.flush()

    def forward(self, address: str, peer: RoutingId, frames: list[Buffer]) -> bool:
        """Deliver to the listener at ``address``; False if there is none yet."""
        if address not in self._started:
            return False
        self._listeners[address].deliver(peer, frames)
        return True

    def closed(self, endpoint: MemoryEndpoint, name: RoutingId) -> None:
        if name:
            self.ends.pop(name, None)
        elif self._listeners.get(endpoint.address) is endpoint:
            del self._listeners[endpoint.address]
            self._started.discard(endpoint.address)
