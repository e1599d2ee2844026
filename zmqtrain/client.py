"""Asking a running job a question, from outside the cluster."""

from __future__ import annotations

import asyncio
import os

from zmqtrain.actors.link import Link
from zmqtrain.actors.waits import Waits
from zmqtrain.cluster import connect_endpoint
from zmqtrain.metrics import Metrics
from zmqtrain.transport.router_dealer import ZmqTransport
from zmqtrain.transport.security import Security
from zmqtrain.wire.codec import Sender
from zmqtrain.wire.messages import Heartbeat, Message


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
    transport = ZmqTransport(security, linger_ms=0)  # what was not answered needs not be sent
    link = Link(
        "ps 0",
        transport.connect(endpoint),
        Waits("you"),
        Metrics("client"),
        identify=lambda: (Sender("client", os.getpid()), 0),
        on_envelope=lambda envelope: None,
        on_fenced=lambda error: None,
        heartbeat=Heartbeat,
        heartbeat_s=1.0,
        peer_timeout_s=timeout_s,
    )
    try:
        reply = await link.request(message, reason="a question of yours", timeout_s=timeout_s)
        return reply.message
    finally:
        link.close()
        transport.close()
