"""The contract of a transport: it moves lists of frames, and knows nothing of what they say.

An :class:`Endpoint` either listens (many peers) or is connected (one peer). Receiving is a
callback on the event loop, never an awaitable: a cancelled receive would lose its message. Sending
never waits: what cannot be taken now is an error, and the request table above resends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from zmqtrain.wire.buffers import Buffer

HIGH_WATER_MARK = 64
"""Messages on their way to or from a peer; back-pressure is by bytes, above: this is the fuse."""

RoutingId: TypeAlias = bytes
"""Where a listening endpoint's message came from, and where the reply goes; b"" when connected.
With keys it is a :class:`zmqtrain.transport.gate.KnownPeer`."""

OnMessage: TypeAlias = Callable[[RoutingId, list[Buffer]], None]

OnTrouble: TypeAlias = Callable[[str, bool], None]
"""Told why another end does not get in here, or this one there, and whether it never will; also
that a connection has ended which is not made again."""


def ignore_trouble(text: str, is_final: bool) -> None:
    """An :data:`OnTrouble` for those who do not mind."""


COPIED_NBYTES = 1 << 16
"""Frames up to here are copied: that costs less than keeping track of them."""


class UnreachableError(Exception):
    """The peer is not connected, or takes no more messages at the moment; nothing was sent."""


class Endpoint(Protocol):
    """One end of a connection, or one listening address."""

    @property
    def address(self) -> str:
        """The address bound or connected to; for a listening endpoint with its real port."""
        ...

    def start(self, on_message: OnMessage) -> None:
        """Deliver every message from now on to ``on_message``, in order for each peer.

        Must be called on the running event loop. Frames delivered stay valid as long as they are
        referenced. ``on_message`` must not raise.
        """
        ...

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        """Send one message. Frames up to ``COPIED_NBYTES`` have been taken over when this returns;
        a larger one is read from where it lies until it has left, so it goes out as it is then.

        A connected endpoint keeps messages until its peer listens, up to a small number.

        Raises:
            UnreachableError: ``peer`` is gone, or the queue to it is full.
        """
        ...

    def close(self, *, discard: bool = False) -> None:
        """Stop delivering and release the address.

        What was sent before still goes out briefly, unless that is to be discarded.
        """
        ...


@runtime_checkable
class Selective(Protocol):
    """An endpoint that may turn others away, or be turned away or cut off."""

    def tell(self, on_trouble: OnTrouble) -> None:
        """Call ``on_trouble``, which must not raise, whenever that happens from now on."""
        ...


@runtime_checkable
class HasShortcuts(Protocol):
    """A transport with a shorter way between two processes of one host.

    A shortcut takes messages of one frame that is not large, as
    :func:`zmqtrain.transport.shortcut.fits` says. Its connected end is :class:`Selective`: it tells
    when the other one is gone.
    """

    def offer_shortcut(self, name: str) -> Endpoint:
        """Listen under a name.

        Raises:
            UnreachableError: that cannot be here.
        """
        ...

    def take_shortcut(self, name: str) -> Endpoint:
        """Connect to who listens under a name.

        Raises:
            UnreachableError: nobody does.
        """
        ...


class Transport(Protocol):
    """Makes endpoints. Addresses are ``tcp://host:port``; port 0 binds any free one."""

    def bind(self, address: str, high_water_mark: int = HIGH_WATER_MARK) -> Endpoint:
        """Listen at ``address``, with up to so many messages on their way to each peer.

        Raises:
            ConfigError: the address is taken or not one of this host, or is beyond loopback and
                there are no keys.
        """
        ...

    def connect(self, address: str) -> Endpoint:
        """Connect to ``address``, whether or not anyone listens there yet.

        Raises:
            ConfigError: the address is wrong, or is beyond loopback and there are no keys.
        """
        ...

    def close(self) -> None:
        """Close whatever is still open."""
        ...
