"""A request that has been sent, or is being sent, and has not been answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.chunks import Chunks
from zmqtrain.wire.codec import Envelope
from zmqtrain.wire.messages import Chunk, Message

UNKNOWN: Message = Chunk(0, 0)
"""Stands for the message of a request that is begun before it is known."""

OnPiece = Callable[[int, Tensor], None]
"""Takes in a chunk of the reply's tensor: its index and its values."""


@dataclass(slots=True)
class Outstanding:
    """A request that has been sent and not been answered."""

    request_id: int
    future: asyncio.Future[Envelope]
    envelope: Envelope
    sequence: int | None  # of a push or pull: resent on evidence, not periodically
    ahead: Chunks | None
    on_chunk: OnPiece | None
    sent_at: float
    asked_at: float
    reason: str
    resend_s: float
    told: bool = False
    wait: int = 0  # its entry among the waits
    timer: asyncio.TimerHandle | None = None
    sent_after: int = 0  # the last request id given when this was sent, its own or a later one
    chunks_sent: int = 0
    untaken_nbytes: int = 0  # of chunks sent, that the peer has not confirmed
    is_sent: bool = False  # the message itself, after its chunks

    @property
    def is_known(self) -> bool:
        """Whether there is a message; its chunks may go before there is."""
        return self.envelope.message is not UNKNOWN
