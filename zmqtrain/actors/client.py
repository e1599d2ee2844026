"""Requests to a running job from outside the cluster."""

from __future__ import annotations

import asyncio
import os

from zmqtrain.actors.link import Link
from zmqtrain.actors.waits import Waits
from zmqtrain.config.cluster import connect_endpoint
from zmqtrain.config.timing import Timing
from zmqtrain.errors import ZmqTrainError
from zmqtrain.observe.metrics import Metrics
from zmqtrain.transport.base import Endpoint
from zmqtrain.transport.by_address import TransportByAddress
from zmqtrain.transport.security import Security
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import Heartbeat, Message


class Client:
    """Sends one request: the owner of a link that never joins."""

    def __init__(self, number: int, timeout_s: float) -> None:
        """``number`` distinguishes clients."""
        self.waits = Waits("you")
        self.metrics = Metrics("client")
        self.timing = Timing(peer_timeout_s=timeout_s)
        self._sender = Sender("client", number)

    def identify(self) -> tuple[Sender, int]:
        return self._sender, 0

    def heartbeat(self) -> Heartbeat:
        return Heartbeat()

    def on_message(self, endpoint: Endpoint, envelope: Envelope) -> None:
        """Ignore it: only the reply matters."""

    def abandon_life(self, error: ZmqTrainError) -> None:
        """Do nothing: a client never joins."""


def ask(
    address: str, message: Message, *, timeout_s: float, security: Security | None = None
) -> Message:
    """Send one request to the ps at ``address`` (host:port or ipc://path); return its reply.

    Raises:
        PeerLostError: no answer within ``timeout_s``.
        ConfigError: the address is beyond this host, and ``security`` has no keys for it.
        RefusedError, ConfigError, ...: the ps refused, with its reason.
    """
    return asyncio.run(_ask(connect_endpoint(address), message, timeout_s, security))


async def _ask(
    endpoint: str, message: Message, timeout_s: float, security: Security | None
) -> Message:
    transport = TransportByAddress(security, linger_s=0)  # a request without a reply can be dropped
    link = Link("ps 0", transport.connect(endpoint), Client(os.getpid(), timeout_s))
    try:
        reply = await link.request(message, reason="", timeout_s=timeout_s)
        return reply.message
    finally:
        link.close()
        transport.close()
