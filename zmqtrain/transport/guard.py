"""What a listener with keys has beside it: it lets in, says who is who, and throws out."""

from __future__ import annotations

import contextlib
from collections import deque
from socket import AF_INET, SHUT_RDWR, SOCK_STREAM, fromfd
from typing import Any

import zmq

from zmqtrain.transport.base import OnFailure
from zmqtrain.transport.gate import Gate, KnownPeer
from zmqtrain.transport.handshake import ListenerWatch
from zmqtrain.transport.zap import Doorkeeper

CUTS = 256  # connections remembered as cut


class Guard:
    """Lets in the holders of allowed keys, and stops listening to one whose key is revoked."""

    def __init__(self, gate: Gate, doorkeeper: Doorkeeper, watch: ListenerWatch) -> None:
        self._gate = gate
        self._doorkeeper = doorkeeper
        self._watch = watch
        self._cut: deque[bytes] = deque(maxlen=CUTS)

    def start(self) -> None:
        """Let in from now on."""
        self._doorkeeper.start()
        self._watch.start()

    def on_failure(self, callback: OnFailure) -> None:
        """Call ``callback`` for everyone who is refused."""
        self._doorkeeper.on_failure = self._watch.on_failure = callback

    def close(self) -> None:
        self._watch.close()
        self._doorkeeper.close()

    def identify(self, name: bytes, frame: zmq.Frame) -> KnownPeer | None:
        """Return who sent a frame over the connection ``name``, None if their key is revoked.

        The frame is asked and not the name, which the peer may choose: it could take that of
        somebody who has just left.
        """
        try:
            public: Any = frame.get("User-Id")
        except zmq.ZMQError:  # nobody was asked whether to let it in
            public = ""
        key = self._gate.find(public)
        if key is not None:
            return key.peer(name)
        if name not in self._cut:
            self._cut.append(name)
            _cut(frame)
        return None


def _cut(frame: zmq.Frame) -> None:
    """Close the connection that a frame came by, for which libzmq has no call.

    The next one is refused at the door. Should it be closed already and its descriptor be that of
    another connection, then that one is made anew by itself.
    """
    with (
        contextlib.suppress(OSError, zmq.ZMQError),
        fromfd(int(frame.get(zmq.SRCFD)), AF_INET, SOCK_STREAM) as connection,
    ):
        connection.shutdown(SHUT_RDWR)
