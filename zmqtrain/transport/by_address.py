"""Unix sockets connect the tasks of a user on one host; ZeroMQ those with keys, or --insecure."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from zmqtrain.transport.base import HIGH_WATER_MARK, Endpoint, cannot_listen
from zmqtrain.transport.loopback import LoopbackListener, LoopbackPeer
from zmqtrain.transport.security import Security
from zmqtrain.transport.stream import LINGER_S
from zmqtrain.transport.unix import SCHEMES, UnixListener, UnixPeer

if TYPE_CHECKING:
    from zmqtrain.transport.router_dealer import ZmqTransport


class TransportByAddress:
    """Makes each endpoint of the kind that its address and the keys call for."""

    def __init__(self, security: Security | None = None, linger_s: float = LINGER_S) -> None:
        """``security``: for tcp connections; ``linger_s``: for unsent messages in ``close``."""
        self._security = security or Security()
        self._linger_s = linger_s
        self._listeners: set[UnixListener] = set()
        self._peers: set[UnixPeer] = set()
        self._zmq: ZmqTransport | None = None  # made, with its threads, on first use

    def bind(self, address: str, high_water_mark: int = HIGH_WATER_MARK) -> Endpoint:
        if not self._is_by_user(address):
            return self._zeromq().bind(address, high_water_mark)
        listen = UnixListener if address.startswith(SCHEMES) else LoopbackListener
        try:
            listener = listen(address, high_water_mark)
        except OSError as error:
            raise cannot_listen(address, error.strerror or error) from None
        self._listeners.add(listener)
        return listener

    def connect(self, address: str) -> Endpoint:
        if not self._is_by_user(address):
            return self._zeromq().connect(address)
        peer = UnixPeer(address) if address.startswith(SCHEMES) else LoopbackPeer(address)
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
        if self._zmq is not None:
            self._zmq.close()

    def _is_by_user(self, address: str) -> bool:
        return address.startswith(SCHEMES) or self._security.is_by_user(address)

    def _zeromq(self) -> ZmqTransport:
        if self._zmq is None:
            from zmqtrain.transport.router_dealer import ZmqTransport

            self._zmq = ZmqTransport(self._security, int(1000 * self._linger_s))
        return self._zmq
