"""A link: an actor's connection to one ps, with its outstanding requests and its heartbeats.

Every request has a reason, for people, and ends by a reply, a refusal, its deadline, or the silence
of the peer. Lost messages are sent again: pushes when the peer's answer to a heartbeat shows that
they or their reply were lost, all other requests periodically.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from functools import partial
from typing import Protocol

from zmqtrain.actors.halts import halt_at
from zmqtrain.actors.outstanding import Attempt, Outstanding
from zmqtrain.actors.waits import Waits
from zmqtrain.compute.arrays import Flat
from zmqtrain.config.timing import Timing
from zmqtrain.errors import (
    FencedError,
    NotAdmittedError,
    PeerLostError,
    ProtocolError,
    ZmqTrainError,
)
from zmqtrain.observe.metrics import Metrics
from zmqtrain.transport.base import Endpoint, RoutingId, UnreachableError
from zmqtrain.wire.buffers import Buffer, Tensor
from zmqtrain.wire.chunks import Add, ChunkAssembler, Chunks
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import (
    Chunk,
    ChunksReceived,
    Heartbeat,
    HeartbeatReply,
    Message,
    Refusal,
)
from zmqtrain.wire.refusals import error_of

RESEND_S = 5.0
BEATS = 64  # last heartbeats whose ids are kept, to recognise their refusals
RESENDS = 4  # before the deadline or the peer timeout, if heartbeats are that frequent

log = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """The sender over a link, which also takes messages that are not replies."""

    waits: Waits
    metrics: Metrics
    timing: Timing

    def identify(self) -> tuple[Sender, int]:
        """Return the sender and its generation."""

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat."""

    def on_message(self, endpoint: Endpoint, envelope: Envelope) -> None:
        """Handle a message that is not a reply."""

    def abandon_life(self, error: ZmqTrainError) -> None:
        """Give up this incarnation, which the peer does not know."""


class Link:
    """One connection to ``peer``. Its owner runs :meth:`beat` for as long as it lives."""

    def __init__(self, peer: str, endpoint: Endpoint, owner: LinkOwner) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.joined = False  # heartbeats begin once the peer has welcomed us
        self.fenced = False  # the peer has refused one: it does not know this incarnation
        self.lost: ZmqTrainError | None = None
        self.window_nbytes = 0  # limit of unacknowledged chunks
        self._failure = ""  # why there is no connection, if known
        self._gone = asyncio.Event()
        self._owner = owner
        self._waits = owner.waits
        self._waits.halts[peer] = partial(halt_at, endpoint.address)
        self._metrics = owner.metrics
        self._waits.limits[peer] = self._given_up_at
        self._beats: deque[int] = deque(maxlen=BEATS)  # those of the current life
        self._received_at: float | None = None  # the last message of the peer
        self._outstanding: dict[int, Outstanding] = {}
        self._last_id = 0
        endpoint.start(self._receive)
        endpoint.on_failure(self._on_failure)

    async def request(
        self,
        message: Message,
        *,
        reason: str,
        tensors: tuple[Tensor, ...] = (),
        out: Flat | None = None,
        timeout_s: float | None = None,
    ) -> Envelope:
        """Send a request and return the envelope of its reply.

        ``out`` receives the parameters of the reply; a reply without all of them counts as lost.
        Without ``timeout_s`` the request may take as long as the peer shows life.

        Raises:
            RefusedError, ProtocolError, ...: the peer refused, with the peer's reason.
            PeerLostError: no reply within ``timeout_s``, or the peer was silent for too long.
        """
        outstanding = self.begin(
            message, reason=reason, tensors=tensors, out=out, timeout_s=timeout_s
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await outstanding.future
        except TimeoutError:
            self._metrics.rpc_timeouts.inc()
            doubts = "is it running, is this its address, can this host reach it?"
            why = halt_at(self.endpoint.address) or self._failure or doubts
            raise PeerLostError(
                f"{self.peer} at {self.endpoint.address} did not answer {self._waits.owner} within "
                f"{timeout_s:g} s{f' ({reason})' if reason else ''}: {why}"
            ) from None
        finally:
            self.end(outstanding)

    def begin(
        self,
        message: Message | None,
        *,
        reason: str,
        tensors: tuple[Tensor, ...] = (),
        chunks: Chunks | None = None,
        out: Flat | None = None,
        add: Add | None = None,
        timeout_s: float | None = None,
        sequence: int | None = None,
    ) -> Outstanding:
        """Send a request, whose ``future`` will hold the reply; :meth:`end` must follow.

        ``chunks`` are sent first, as fast as the peer acknowledges them. ``add`` adds a difference
        to ``out``; None: none is expected. ``sequence`` is that of a push. ``timeout_s`` is for the
        resends and the status; other arguments are as for :meth:`request`. Without a message, only
        chunks are sent until :meth:`complete` adds it.
        """
        if self.lost is not None:
            raise self.lost
        self._last_id += 1
        sender, generation = self._owner.identify()
        now = time.monotonic()
        limit_s = self._owner.timing.peer_timeout_s
        if timeout_s is not None:
            limit_s = min(limit_s, timeout_s)
        outstanding = self._outstanding[self._last_id] = Outstanding(
            request_id=self._last_id,
            sender=sender,
            generation=generation,
            message=message,
            tensors=tensors,
            chunks=chunks,
            incoming=ChunkAssembler(out, add) if out is not None else None,
            sequence=sequence,
            resend_s=min(RESEND_S, limit_s / RESENDS),
            future=asyncio.get_running_loop().create_future(),
            wait=self._waits.begin(self.peer, reason, timeout_s),
            asked_at=now,
            attempt=Attempt(now, self._last_id),
        )
        self.go_on(outstanding)
        return outstanding

    def go_on(self, outstanding: Outstanding) -> None:
        """Send a request's chunks as far as the window allows, then its message."""
        attempt, chunks = outstanding.attempt, outstanding.chunks
        attempt.after = self._last_id
        if chunks is not None:
            while (part := attempt.next_chunk(chunks, self.window_nbytes)) is not None:
                self._transmit(outstanding.envelope(*part))
            if attempt.chunks_sent < chunks.ready:
                return
        if outstanding.message is not None and not attempt.is_complete:
            attempt.is_complete = True
            self._transmit(outstanding.envelope(outstanding.message, outstanding.tensors))

    def complete(self, outstanding: Outstanding, message: Message, *, with_chunks: bool) -> None:
        """Send the message of a request that was begun without one, after its last chunks."""
        outstanding.message = message
        outstanding.asked_at = time.monotonic()
        if not with_chunks:
            outstanding.chunks = None
        elif outstanding.chunks is not None:
            outstanding.chunks.add(range(len(outstanding.chunks)))
        self.go_on(outstanding)

    def end(self, outstanding: Outstanding) -> None:
        """Forget a request, answered or not."""
        self._outstanding.pop(outstanding.request_id, None)
        future = outstanding.future
        # Reading the exception marks it as seen, even if another request failed first.
        if not future.done() or future.cancelled() or future.exception() is not None:
            self._end_wait(outstanding)

    def _end_wait(self, outstanding: Outstanding) -> None:
        """End the wait for this reply, and observe its duration."""
        duration_s = time.monotonic() - outstanding.asked_at
        kind = type(outstanding.message).__name__
        self._metrics.rpc_duration_seconds[kind].observe(duration_s)
        self._waits.end(outstanding.wait)

    def send(self, message: Message) -> None:
        """Send a message that needs no reply; it may be lost."""
        sender, generation = self._owner.identify()
        self._transmit(Envelope(message, sender, 0, generation))

    async def silence(self) -> None:
        """Wait until the peer is given up.

        Raises:
            PeerLostError: the peer is lost.
            RefusedError: the peer refuses our connection.
        """
        await self._gone.wait()
        raise self.lost or PeerLostError(f"{self.peer} is gone")

    async def beat(self) -> None:
        """Send heartbeats, resend lost requests, give up a silent peer. Runs until cancelled."""
        while True:
            if self.joined:
                self._send_heartbeat()
            before = time.monotonic()
            await asyncio.sleep(self._owner.timing.heartbeat_s)
            now = time.monotonic()
            self._waits.log_long()
            for outstanding in self._outstanding.values():
                if outstanding.is_overdue(now):
                    self._resend(outstanding)
            if self._received_at is None:  # it is given up at the deadline of the join
                continue
            limit_s = self._owner.timing.peer_timeout_s
            if now - before > self._owner.timing.heartbeat_s + limit_s / 2:
                self._received_at = now  # it was this process that was suspended
            silent_s = now - self._received_at
            if silent_s > limit_s:
                where = f"{self.peer} at {self.endpoint.address}"
                text = f"{where} has been silent for {silent_s:.1f} s"
                why = halt_at(self.endpoint.address) or "it has ended, or this host cannot reach it"
                self._lose(PeerLostError(f"{text}: {why}"))

    def check(self) -> None:
        """Return if the peer knows this life.

        Raises:
            FencedError: it has a new life, or considered this one dead.
            PeerLostError, RefusedError: the peer was given up.
        """
        if self.lost is not None:
            raise self.lost
        if self.fenced:
            raise FencedError(f"{self.peer} does not know this life any more")

    @property
    def is_alive(self) -> bool:
        """Whether the peer has welcomed us and has sent something within three heartbeats."""
        if not self.joined or self.lost is not None or self._received_at is None:
            return False
        return time.monotonic() - self._received_at < 3 * self._owner.timing.heartbeat_s

    def _given_up_at(self) -> float | None:
        """Return when a silent peer is given up; None: it is alive, or has never answered."""
        if self._received_at is None or self.is_alive:
            return None
        return self._received_at + self._owner.timing.peer_timeout_s

    def begin_life(self) -> None:
        """Send no heartbeat before the next welcome; ignore refusals of earlier ones."""
        self.joined = False
        self._beats.clear()

    def abandon(self, error: ZmqTrainError) -> None:
        """Fail every outstanding request: the life that sent them is over."""
        for outstanding in self._outstanding.values():
            if not outstanding.future.done():
                outstanding.future.set_exception(error)

    def ask_again(self) -> None:
        """Send every request again with the next heartbeat: the peer was not ready."""
        for outstanding in self._outstanding.values():
            outstanding.attempt.at = -math.inf

    def close(self, *, discard: bool = False) -> None:
        self._lose(PeerLostError(f"the link to {self.peer} was closed"))
        # Nothing can be delivered to a peer that never answered.
        self.endpoint.close(discard=discard or self._received_at is None)

    def _send_heartbeat(self) -> None:
        self._last_id += 1
        self._beats.append(self._last_id)
        sender, generation = self._owner.identify()
        self._transmit(Envelope(self._owner.heartbeat(), sender, self._last_id, generation))

    def _resend(self, outstanding: Outstanding) -> None:
        """Send a request again, from its first chunk on."""
        self._metrics.rpc_retries.inc()
        outstanding.attempt = Attempt(time.monotonic(), self._last_id)
        self.go_on(outstanding)

    def _transmit(self, envelope: Envelope) -> None:
        frames = encode(envelope)
        self._metrics.bytes_sent.inc(sum(map(len, frames)))
        try:
            self.endpoint.send(frames)
        except UnreachableError as error:
            log.debug("%s: not sent: %s", self.peer, error)  # resent, or replaced by the next

    def _receive(self, _: RoutingId, frames: list[Buffer]) -> None:
        self._metrics.bytes_received.inc(sum(map(len, frames)))
        try:
            envelope = decode(frames)
        except ProtocolError as error:
            self._on_garbage(error)
            return
        self._received_at = time.monotonic()
        request_id, message = envelope.request_id, envelope.message
        if type(message) is HeartbeatReply:
            self._on_heartbeat_reply(request_id, message)
        elif request_id == 0:
            self._owner.on_message(self.endpoint, envelope)
        elif type(message) is Refusal and request_id in self._beats:
            self._on_fenced(message)
        else:
            outstanding = self._outstanding.get(request_id)
            # A late reply to a request that was sent twice or given up has none.
            if outstanding is not None and not outstanding.future.done():
                try:
                    self._on_reply(outstanding, envelope)
                except Exception as error:  # a wrong reply, or a bug: it would come again and again
                    outstanding.future.set_exception(error)

    def _on_reply(self, outstanding: Outstanding, envelope: Envelope) -> None:
        message = envelope.message
        if type(message) is Chunk:
            if outstanding.incoming is None:
                raise ProtocolError(f"{self.peer} sent a chunk that was not asked for")
            outstanding.incoming.take(message, envelope.tensors)
            outstanding.attempt.at = time.monotonic()
        elif type(message) is ChunksReceived:
            outstanding.attempt.acknowledge(message.nbytes)
            self.go_on(outstanding)
        elif type(message) is Refusal:
            raise error_of(message, self.peer)
        else:
            self._on_answer(outstanding, envelope)

    def _on_heartbeat_reply(self, beat: int, reply: HeartbeatReply) -> None:
        for outstanding in self._outstanding.values():
            if outstanding.is_lost(beat, reply):
                log.info("%s: sending push %d again", self.peer, outstanding.sequence)
                self._resend(outstanding)

    def _on_answer(self, outstanding: Outstanding, envelope: Envelope) -> None:
        """Take an answer, unless chunks of its parameters were lost.

        Such an answer counts as lost: the request is sent again, and the peer answers again.
        """
        if lost := outstanding.take_in(envelope):
            log.info("%s: %d chunks of its parameters were lost", self.peer, lost)
        else:
            self._end_wait(outstanding)
            outstanding.future.set_result(envelope)

    def _on_garbage(self, error: ProtocolError) -> None:
        self._metrics.decode_errors.inc()
        log.error("%s sent bytes that are not a message: %s", self.peer, error)
        if not self.joined:  # the peer has sent no valid message, and never will
            self.abandon(ProtocolError(f"{self.peer} at {self.endpoint.address}: {error}"))

    def _on_fenced(self, refusal: Refusal) -> None:
        """Handle a refused heartbeat: the peer does not know this incarnation or its requests."""
        if self.joined:  # otherwise it concerns the life before
            self.fenced = True
            self._owner.abandon_life(error_of(refusal, self.peer))

    def _on_failure(self, text: str, is_final: bool) -> None:
        """Handle a failed connection; a final failure ends the link."""
        where = f"{self.peer} at {self.endpoint.address}"
        if is_final:
            self._lose(NotAdmittedError(f"{where}: {text}"))
        elif text != self._failure:
            log.warning("%s: %s", where, text)
        self._failure = text

    def _lose(self, error: ZmqTrainError) -> None:
        if self.lost is None:
            self.lost = error
            self._gone.set()
        self.abandon(self.lost)
