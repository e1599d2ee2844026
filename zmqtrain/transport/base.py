"""The contract of a transport: it moves lists of frames, and does not know their content.

An :class:`Endpoint` either listens (many peers) or is connected (one peer). Receiving is a
callback on the event loop, never an awaitable: a cancelled receive would lose its message. Sending
never waits: a full queue is an error, and the layer above sends again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from zmqtrain.errors import ConfigError
from zmqtrain.wire.buffers import Buffer

HIGH_WATER_MARK = 64  # messages under way to or from a peer; the layer above limits bytes

RoutingId: TypeAlias = bytes
"""The sender of a listening endpoint's message, to which the reply goes; b"" when connected.
With keys it is a :class:`zmqtrain.transport.registry.KnownPeer`."""

OnMessage: TypeAlias = Callable[[RoutingId, list[Buffer]], None]

OnFailure: TypeAlias = Callable[[str, bool], None]
"""Called with the reason for a refused connection, and whether the refusal is final."""


def ignore_failure(text: str, is_final: bool) -> None:
    """An :data:`OnFailure` that does nothing."""


COPIED_NBYTES = 1 << 16  # frames up to this size are copied: that is cheaper than tracking them


class UnreachableError(Exception):
    """The peer is not connected, or takes no more messages at the moment; nothing was sent."""


def cannot_listen(address: str, reason: object) -> ConfigError:
    return ConfigError(
        f"cannot listen at {address}: {reason}. Another task may be running there, also with this "
        "one's index; end it, or correct --index or the address (--ps, --workers, --base-port)"
    )


class Endpoint(Protocol):
    """One end of a connection, or one listening address."""

    @property
    def address(self) -> str:
        """The address bound or connected to; for a listening endpoint with its real port."""

    def start(self, on_message: OnMessage) -> None:
        """Deliver every message from now on to ``on_message``, in order for each peer.

        Must be called on the running event loop. Frames delivered stay valid as long as they are
        referenced. ``on_message`` must not raise.
        """

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        """Send one message. Frames up to ``COPIED_NBYTES`` have been taken over when this returns;
        a larger one is not copied, and must not change until it is sent.

        A connected endpoint keeps messages until its peer listens, up to a small number.

        Raises:
            UnreachableError: ``peer`` is gone, or the queue to it is full.
        """

    def on_failure(self, callback: OnFailure) -> None:
        """Call ``callback``, which must not raise, whenever a connection is refused."""

    def close(self, *, discard: bool = False) -> None:
        """Stop delivering and release the address.

        Messages sent before may still go out for a short time, unless ``discard``.
        """


class Transport(Protocol):
    """Makes endpoints. An address begins with the scheme of its transport, as in
    ``tcp://host:port``, where port 0 binds any free one, or ``unix:///path``."""

    def bind(self, address: str, high_water_mark: int = HIGH_WATER_MARK) -> Endpoint:
        """Listen at ``address``; ``high_water_mark``: most messages under way to each peer.

        Raises:
            ConfigError: the address is taken, or is not of this host, or is unprotected.
        """

    def connect(self, address: str) -> Endpoint:
        """Connect to ``address``, even if no task listens there yet.

        Raises:
            ConfigError: the address is wrong, or the connection would be unprotected.
        """

    def close(self) -> None:
        """Close all open endpoints."""
