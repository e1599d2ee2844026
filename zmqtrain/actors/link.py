"""A link: an actor's connection to one ps, with its outstanding requests and its pulse.

Every request has a reason that can be shown and ends by a reply, a refusal, its deadline, or the
silence of the peer. What was lost on the way is sent again: pushes when the peer's answer to a
heartbeat shows that it never saw them (or that its reply was lost), everything else periodically.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import replace
from typing import Protocol

from zmqtrain.actors.outstanding import UNKNOWN, OnPiece, Outstanding
from zmqtrain.actors.waits import Waits
from zmqtrain.config.timing import Timing
from zmqtrain.errors import FencedError, PeerLostError, ProtocolError, RefusedError, ZmqTrainError
from zmqtrain.observe.metrics import Metrics
from zmqtrain.transport.base import Endpoint, RoutingId, UnreachableError
from zmqtrain.wire.buffers import Buffer, Tensor
from zmqtrain.wire.chunks import Chunks
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import Alive, Chunk, Heartbeat, Message, Refusal, Taken
from zmqtrain.wire.refusals import error_of

RESEND_S = 5.0
RESENDS = 4  # before a deadline, as far as heartbeats are as frequent
BEATS = 64  # heartbeats whose refusal is understood as such
PATIENCE_S = 2.0  # a wait longer than this is worth a line in the log

log = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """Who speaks over a link, and hears of what comes unasked."""

    waits: Waits
    metrics: Metrics
    timing: Timing

    def identify(self) -> tuple[Sender, int]:
        """Return who is speaking, and in which generation."""

    def heartbeat(self) -> Heartbeat:
        """Return what the next heartbeat says."""

    def on_message(self, endpoint: Endpoint, envelope: Envelope) -> None:
        """Take a message that is no reply."""

    def abandon_life(self, error: ZmqTrainError) -> None:
        """The peer does not know this incarnation."""


class Link:
    """One connection to ``peer``. Its owner runs :meth:`beat` for as long as it lives."""

    def __init__(
        self,
        peer: str,
        endpoint: Endpoint,
        owner: LinkOwner,
    ) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.joined = False  # heartbeats begin once the peer has welcomed us
        self.fenced = False  # the peer has refused one: it does not know this incarnation
        self.lost: ZmqTrainError | None = None
        self._trouble = ""  # why no connection comes about, as far as it is known
        self.window_nbytes = 0  # chunks that may be under way, unconfirmed
        self._gone = asyncio.Event()
        self._owner = owner
        self._waits = owner.waits
        self._metrics = owner.metrics
        self._outstanding: dict[int, Outstanding] = {}
        self._last_id = 0
        self._beats: deque[int] = deque(maxlen=BEATS)  # request ids of the last heartbeats
        self.heard_at: float | None = None
        endpoint.start(self._receive)
        endpoint.on_failure(self._on_failure)

    async def request(
        self,
        message: Message,
        *,
        reason: str,
        on_chunk: OnPiece | None = None,
        timeout_s: float | None = None,
    ) -> Envelope:
        """Send a request and return the envelope of its reply.

        ``on_chunk`` is given the chunks that come ahead of the reply. Without ``timeout_s`` the
        request may take as long as the peer shows life.

        Raises:
            RefusedError, ProtocolError, ...: the peer refused, with the peer's reason.
            PeerLostError: no reply within ``timeout_s``, or the peer was silent for too long.
        """
        outstanding = self.begin(
            message,
            reason=reason,
            on_chunk=on_chunk,
            timeout_s=timeout_s,
        )
        try:
            return await outstanding.future
        finally:
            self.end(outstanding)

    def begin(
        self,
        message: Message | None,
        *,
        reason: str,
        tensors: tuple[Tensor, ...] = (),
        ahead: Chunks | None = None,
        on_chunk: OnPiece | None = None,
        timeout_s: float | None = None,
        sequence: int | None = None,
    ) -> Outstanding:
        """Send a request whose reply its ``future`` will hold; :meth:`end` must follow.

        ``ahead`` are chunks that go first, as fast as the peer takes them in. ``sequence`` is that
        of a push. The rest is as for :meth:`request`. Without a message, only chunks go until
        :meth:`complete` tells it.
        """
        if self.lost is not None:
            raise self.lost
        loop = asyncio.get_running_loop()
        self._last_id += 1
        sender, generation = self._owner.identify()
        now = time.monotonic()
        outstanding = self._outstanding[self._last_id] = Outstanding(
            self._last_id,
            loop.create_future(),
            Envelope(message or UNKNOWN, sender, self._last_id, generation, tensors),
            sequence,
            ahead,
            on_chunk,
            now,
            now,
            reason,
            RESEND_S if timeout_s is None else min(RESEND_S, timeout_s / RESENDS),
        )
        outstanding.wait = self._waits.begin(self.peer, reason, timeout_s)
        if timeout_s is not None:
            outstanding.timer = loop.call_later(timeout_s, self._expire, outstanding, timeout_s)
        self._send(outstanding)
        return outstanding

    def complete(self, outstanding: Outstanding, message: Message, *, with_chunks: bool) -> None:
        """Send the message that a request was begun without, after its last chunks."""
        outstanding.envelope = replace(outstanding.envelope, message=message)
        outstanding.asked_at = time.monotonic()
        if not with_chunks:
            outstanding.ahead = None
        elif outstanding.ahead is not None:
            outstanding.ahead.add(range(len(outstanding.ahead)))
        self.go_on(outstanding)

    def end(self, outstanding: Outstanding) -> None:
        """Forget a request, answered or not."""
        duration_s = time.monotonic() - outstanding.asked_at
        kind = type(outstanding.envelope.message).__name__
        self._metrics.rpc_duration_seconds[kind].observe(duration_s)
        self._waits.end(outstanding.wait)
        self._outstanding.pop(outstanding.request_id, None)
        future = outstanding.future
        if future.done() and not future.cancelled():
            future.exception()  # seen, even if another request failed first
        if outstanding.timer is not None:
            outstanding.timer.cancel()

    async def silence(self) -> None:
        """Wait until the peer is given up.

        Raises:
            PeerLostError: always, in the end.
            RefusedError: or this, if the peer does not let us in.
        """
        await self._gone.wait()
        raise self.lost or PeerLostError(f"{self.peer} is gone")

    def tell(self, message: Message) -> None:
        """Send a message that asks for no reply; it may be lost."""
        sender, generation = self._owner.identify()
        self._try_send(Envelope(message, sender, 0, generation))

    async def beat(self) -> None:
        """Send heartbeats, resend what was lost, give up a silent peer. Runs until cancelled."""
        while True:
            if self.joined:
                self._pulse()
            timing, before = self._owner.timing, time.monotonic()
            await asyncio.sleep(timing.heartbeat_s)
            now = time.monotonic()
            if now - before > timing.heartbeat_s + timing.peer_timeout_s / 2 and self.heard_at:
                self.heard_at = now  # it was this process that slept
            for outstanding in self._outstanding.values():
                self._review(outstanding, now)
            # A peer never heard of is given up by the deadline of the join that waits for it.
            silent_s = now - self.heard_at if self.heard_at is not None else 0.0
            if silent_s > self._owner.timing.peer_timeout_s:
                self._lose(PeerLostError(f"{self.peer} has been silent for {silent_s:.1f} s"))

    def check(self) -> None:
        """Return if the peer knows this life.

        Raises:
            FencedError: it does not: it has a new life, or took this one for dead.
            PeerLostError, RefusedError: it was given up.
        """
        if self.lost is not None:
            raise self.lost
        if self.fenced:
            raise FencedError(f"{self.peer} does not know this life any more")

    @property
    def is_alive(self) -> bool:
        """Whether the peer has welcomed us and was heard of lately."""
        if not self.joined or self.heard_at is None or self.lost is not None:
            return False
        return time.monotonic() - self.heard_at < 3 * self._owner.timing.heartbeat_s

    def begin_life(self) -> None:
        """Say nothing before the next welcome; refusals of heartbeats so far are of the past."""
        self.joined = False
        self._beats.clear()

    def close(self) -> None:
        self._lose(PeerLostError(f"the link to {self.peer} was closed"))
        self.endpoint.close(discard=self.heard_at is None)  # or its end waits for who never came

    def _pulse(self) -> None:
        self._last_id += 1
        self._beats.append(self._last_id)
        sender, generation = self._owner.identify()
        beat = Envelope(self._owner.heartbeat(), sender, self._last_id, generation)
        self._try_send(beat)

    def _review(self, outstanding: Outstanding, now: float) -> None:
        if not outstanding.told and now - outstanding.asked_at > PATIENCE_S:
            outstanding.told = True  # once for each wait
            log.info("waiting for %s: %s", self.peer, outstanding.reason)
        if outstanding.sequence is None and now - outstanding.sent_at > outstanding.resend_s:
            self._resend(outstanding)

    def _resend(self, outstanding: Outstanding) -> None:
        self._metrics.rpc_retries.inc()
        self._send(outstanding)

    def _send(self, outstanding: Outstanding) -> None:
        """Send a request from its first chunk on."""
        outstanding.sent_at = time.monotonic()
        outstanding.chunks_sent = outstanding.untaken_nbytes = 0
        outstanding.is_sent = False
        self.go_on(outstanding)

    def go_on(self, outstanding: Outstanding) -> None:
        """Send what the peer's credit allows of a request's chunks, and after them the message."""
        whole, ahead = outstanding.envelope, outstanding.ahead
        outstanding.sent_after = self._last_id
        while ahead is not None and outstanding.chunks_sent < ahead.known:
            chunk, tensors = ahead[outstanding.chunks_sent]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            under_way = outstanding.untaken_nbytes
            if under_way and under_way + nbytes > self.window_nbytes:
                return
            self._try_send(
                Envelope(chunk, whole.sender, whole.request_id, whole.generation, tensors)
            )
            outstanding.chunks_sent += 1
            outstanding.untaken_nbytes += nbytes
        if outstanding.is_known and not outstanding.is_sent:
            outstanding.is_sent = True
            self._try_send(whole)

    def _try_send(self, envelope: Envelope) -> None:
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
            self._metrics.decode_errors.inc()
            log.error("%s sent what is not a message: %s", self.peer, error)
            if not self.joined:  # nothing we understand has come, and nothing will
                self.abandon(ProtocolError(f"{self.peer} at {self.endpoint.address}: {error}"))
            return
        self.heard_at = time.monotonic()
        outstanding = self._outstanding.get(envelope.request_id)
        message = envelope.message
        if type(message) is Alive:
            self._on_alive(envelope.request_id, message)
        elif envelope.request_id == 0:
            self._owner.on_message(self.endpoint, envelope)
        elif envelope.request_id in self._beats and type(message) is Refusal:
            self._fence(message)
        elif outstanding is None:
            return  # a late reply to a request that was sent twice, or given up
        elif outstanding.future.done():
            return
        elif type(message) is Chunk:
            self._take_chunk(outstanding, message.index, envelope.tensors)
        elif type(message) is Taken:
            outstanding.untaken_nbytes = max(0, outstanding.untaken_nbytes - message.nbytes)
            self.go_on(outstanding)
        elif type(message) is Refusal:
            outstanding.future.set_exception(error_of(message, self.peer))
        else:
            outstanding.future.set_result(envelope)

    def _on_alive(self, beat: int, alive: Alive) -> None:
        """Resend a push that the peer never got, or whose reply never came back.

        Messages of one connection keep their order: a heartbeat sent behind a push that arrives
        without it, or an answer that overtakes the push's reply, proves the loss. The answer to a
        heartbeat sent before the push proves nothing.
        """
        for outstanding in self._outstanding.values():
            sequence = outstanding.sequence
            if sequence is None or beat <= outstanding.sent_after or outstanding.future.done():
                continue
            if not outstanding.is_known:  # the peer cannot have it
                continue
            # What is not sent yet waits for credit: the peer would have given it before this.
            if alive.received < sequence or alive.answered >= sequence:
                log.info("%s: sending push %d again", self.peer, sequence)
                self._resend(outstanding)

    def _take_chunk(
        self, outstanding: Outstanding, index: int, tensors: tuple[Tensor, ...]
    ) -> None:
        try:
            if outstanding.on_chunk is None or len(tensors) != 1:
                raise ProtocolError(f"{self.peer} sent a chunk that was not asked for")
            outstanding.on_chunk(index, tensors[0])
            outstanding.sent_at = time.monotonic()  # it is being answered
        except ProtocolError as error:
            outstanding.future.set_exception(error)

    def abandon(self, error: ZmqTrainError) -> None:
        """Fail every request under way: the life they belong to is over."""
        for outstanding in self._outstanding.values():
            if not outstanding.future.done():
                outstanding.future.set_exception(error)

    def _fence(self, refusal: Refusal) -> None:
        """A heartbeat was refused: the peer does not know this incarnation, nor its requests."""
        if self.joined:  # else it is about the life before
            self.fenced = True
            self._owner.abandon_life(error_of(refusal, self.peer))

    def _expire(self, outstanding: Outstanding, timeout_s: float) -> None:
        if not outstanding.future.done():
            self._metrics.rpc_timeouts.inc()
            reason = f" ({outstanding.reason})" if outstanding.reason else ""
            outstanding.future.set_exception(
                PeerLostError(
                    f"{self.peer} at {self.endpoint.address} did not answer within "
                    f"{timeout_s:g} s{reason}: "
                    f"{self._trouble or 'is it running, and is this its address?'}"
                )
            )

    def _on_failure(self, text: str, is_final: bool) -> None:
        """The connection does not come about; if that is final, so is the link's end."""
        where = f"{self.peer} at {self.endpoint.address}"
        if is_final:
            self._lose(RefusedError(f"{where}: {text}"))
        elif text != self._trouble:
            log.warning("%s: %s", where, text)
        self._trouble = text

    def _lose(self, error: ZmqTrainError) -> None:
        if self.lost is None:
            self.lost = error
            self._gone.set()
        self.abandon(self.lost)
