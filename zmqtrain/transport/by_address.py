"""Unix sockets connect the tasks of a user on one host; ZeroMQ those with keys, or --insecure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqtrain.transport.base import HIGH_WATER_MARK, Endpoint, Transport
from zmqtrain.transport.loopback import LoopbackTransport
from zmqtrain.transport.security import Security
from zmqtrain.transport.stream import LINGER_S
from zmqtrain.transport.unix import SCHEMES, UnixTransport

if TYPE_CHECKING:
    from zmqtrain.transport.router_dealer import ZmqTransport


class TransportByAddress:
    """Makes each endpoint by the transport that its address and the keys call for."""

    def __init__(self, security: Security | None = None, linger_s: float = LINGER_S) -> None:
        """``security``: for tcp connections; ``linger_s``: for unsent messages in ``close``."""
        self._security = security or Security()
        self._linger_s = linger_s
        self._unix = UnixTransport(linger_s)
        self._loopback = LoopbackTransport(linger_s)
        self._zmq: ZmqTransport | None = None  # made, with its threads, on first use

    def bind(self, address: str, high_water_mark: int = HIGH_WATER_MARK) -> Endpoint:
        return self._of(address).bind(address, high_water_mark)

    def connect(self, address: str) -> Endpoint:
        return self._of(address).connect(address)

    def close(self) -> None:
        self._unix.close()
        self._loopback.close()
        if self._zmq is not None:
            self._zmq.close()

    def _of(self, address: str) -> Transport:
        if address.startswith(SCHEMES):
            return self._unix
        if self._security.is_by_user(address):
            return self._loopback
        if self._zmq is None:
            from zmqtrain.transport.router_dealer import ZmqTransport

            self._zmq = ZmqTransport(self._security, int(1000 * self._linger_s))
        return self._zmq
