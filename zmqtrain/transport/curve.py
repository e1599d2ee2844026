"""CURVE, ZeroMQ's encryption, as options of sockets; they must be set before bind or connect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import zmq
from zmq.utils import z85

from zmqtrain.errors import ConfigError
from zmqtrain.transport.keys import Owner, Pair, add_keys

DOMAIN = b"zmqtrain"


def make_pair() -> Pair:
    """Return a new key.

    Raises:
        ConfigError: ZeroMQ was built without encryption.
    """
    _check_available()
    public, secret = zmq.curve_keypair()
    return Pair(z85.decode(public).hex(), z85.decode(secret).hex())


def make_keys(directory: Path, counts: Mapping[str, int]) -> int:
    """Make a directory of keys; return their number. ``counts``: the number of tasks by role.

    Raises:
        ConfigError: see :func:`zmqtrain.transport.keys.add_keys`.
    """
    owners = [Owner(role, index) for role, count in counts.items() for index in range(count)]
    add_keys(directory, {owner: make_pair() for owner in owners})
    return len(owners)


def public_of(secret: bytes) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def secure_listener(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Make a socket accept only encrypted connections that ZAP admits.

    The enforced domain refuses every peer while there is no ZAP handler.
    """
    _check_available()
    socket.set(zmq.CURVE_SECRETKEY, secret)
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.ZAP_DOMAIN, DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_peer(socket: zmq.Socket[bytes], secret: bytes, server: bytes) -> None:
    """Make a socket connect, with its own key, to the holder of the public key ``server``."""
    _check_available()
    socket.set(zmq.CURVE_SERVERKEY, server)
    socket.set(zmq.CURVE_PUBLICKEY, public_of(secret))
    socket.set(zmq.CURVE_SECRETKEY, secret)


def _check_available() -> None:
    if not zmq.has("curve"):
        raise ConfigError(
            "the installed ZeroMQ has no encryption (CURVE); expected one built with libsodium; "
            "install pyzmq from its wheel, or say --insecure on a network that you trust"
        )
