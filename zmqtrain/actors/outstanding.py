"""A request without a reply: its content, and how much of it has been sent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.chunks import ChunkAssembler, Chunks, Part
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import HeartbeatReply, Message, Parameters, PullReply, PushReply

_WITH_PARAMETERS = PushReply, PullReply, Parameters


@dataclass(slots=True)
class Attempt:
    """One sending of a request: first its chunks, within the peer's window, then its message."""

    at: float  # when it began, or the last chunk of the reply came
    after: int  # the last request id given when something of it was sent
    chunks_sent: int = 0
    unacknowledged_nbytes: int = 0
    is_complete: bool = False  # the message has been sent

    def next_chunk(self, chunks: Chunks, window_nbytes: int) -> Part | None:
        """Return the chunk to send now; None if all are sent or the window is full."""
        if self.chunks_sent >= chunks.ready:
            return None
        chunk, tensors = chunks[self.chunks_sent]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if self.unacknowledged_nbytes and self.unacknowledged_nbytes + nbytes > window_nbytes:
            return None
        self.chunks_sent += 1
        self.unacknowledged_nbytes += nbytes
        return chunk, tensors

    def acknowledge(self, nbytes: int) -> None:
        self.unacknowledged_nbytes = max(0, self.unacknowledged_nbytes - nbytes)


@dataclass(slots=True, kw_only=True)
class Outstanding:
    """A request that is sent, at least in part, and has no reply."""

    request_id: int
    sender: Sender
    generation: int
    message: Message | None  # None: chunks are sent before it is known
    tensors: tuple[Tensor, ...]
    chunks: Chunks | None
    incoming: ChunkAssembler | None  # None: the reply has no parameters
    sequence: int | None  # of a push, which is resent on evidence, not periodically
    resend_s: float
    future: asyncio.Future[Envelope]
    wait: int  # its entry among the waits
    asked_at: float
    attempt: Attempt
    has_parameters: bool = True  # False: the reply, which stops a worker, came without them

    def envelope(self, message: Message, tensors: tuple[Tensor, ...]) -> Envelope:
        return Envelope(message, self.sender, self.request_id, self.generation, tensors)

    def take_in(self, reply: Envelope) -> int:
        """Take in the parameters of a reply; return the number of their chunks that were lost.

        A stopped worker needs none: 0 are lost then, and ``has_parameters`` is whether all came.

        Raises:
            ProtocolError: its tensors are not those of the parameters.
        """
        message = reply.message
        if self.incoming is None or not isinstance(message, _WITH_PARAMETERS):
            return 0
        stops = not isinstance(message, Parameters) and message.stop
        if stops and not (reply.tensors or self.incoming.has_chunks):
            self.has_parameters = False
            return 0
        is_difference = isinstance(message, PushReply) and message.is_difference
        lost = self.incoming.finish(message.version, reply.tensors, is_difference=is_difference)
        self.has_parameters = not lost
        return 0 if stops else lost

    def is_overdue(self, now: float) -> bool:
        return self.sequence is None and now - self.attempt.at > self.resend_s

    def is_lost(self, beat: int, reply: HeartbeatReply) -> bool:
        """Return whether the answer to a heartbeat proves that a push, or its reply, was lost.

        Messages of one connection keep their order: a heartbeat sent behind a push that arrives
        without it, or an answer that overtakes the push's reply, proves the loss. The answer to a
        heartbeat sent before the push proves nothing.
        """
        if self.sequence is None or self.message is None or self.future.done():
            return False
        # Unsent chunks wait for the window, which the peer would have opened before this.
        is_missing = reply.received < self.sequence or reply.answered >= self.sequence
        return is_missing and beat > self.attempt.after
