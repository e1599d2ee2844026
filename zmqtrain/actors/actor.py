"""An actor: one task of the cluster on one event loop.

It owns its endpoints, its links and every background task; it hands each message to the handler of
its type, one at a time. Handlers are plain functions and return at once; some answer later.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVarTuple

from zmqtrain.actors.link import Link
from zmqtrain.actors.permissions import check_identity, check_permission, may_ask_for_a_client
from zmqtrain.actors.waits import Waits
from zmqtrain.compute.arrays import Flat
from zmqtrain.config.cluster import Task
from zmqtrain.config.timing import Timing
from zmqtrain.errors import PeerLostError, ProtocolError, RefusedError, ZmqTrainError
from zmqtrain.observe.metrics import Metrics
from zmqtrain.transport.base import (
    HIGH_WATER_MARK,
    Endpoint,
    RoutingId,
    Transport,
    UnreachableError,
)
from zmqtrain.transport.keys import Owner
from zmqtrain.transport.registry import KnownPeer
from zmqtrain.wire import messages
from zmqtrain.wire.buffers import Buffer, Tensor
from zmqtrain.wire.chunks import Encode, as_it_is, split
from zmqtrain.wire.codec import Envelope, Sender, decode, encode, request_id_of
from zmqtrain.wire.refusals import refusal_of

Arguments = TypeVarTuple("Arguments")

REFUSALS = 256  # remembered reasons; each is logged once

log = logging.getLogger(__name__)


ResendId: TypeAlias = tuple[RoutingId, str, int]
"""A connection, its sender and the number of a request: the same when that is sent again."""


@dataclass(slots=True, eq=False)
class Request:
    """A received envelope, and the way back to its sender."""

    _actor: Actor
    endpoint: Endpoint
    peer: RoutingId
    envelope: Envelope

    @property
    def sender(self) -> Sender:
        return self.envelope.sender

    @property
    def resend_id(self) -> ResendId:
        return self.peer, str(self.sender), self.envelope.request_id

    @property
    def over_link(self) -> bool:
        """Whether it came over our own link, not from a peer that connected to us."""
        return not self.peer

    @property
    def is_revoked(self) -> bool:
        return isinstance(self.peer, KnownPeer) and not self.peer.key.allowed

    def reply(self, message: messages.Message, tensors: tuple[Tensor, ...] = ()) -> None:
        """Send a reply; if the sender cannot be reached now, it sends the request again."""
        self._actor.send(self.endpoint, message, self.envelope.request_id, tensors, self.peer)

    def reply_with(
        self,
        message: messages.PullReply | messages.PushReply | messages.Parameters,
        flat: Flat,
        encode: Encode = as_it_is,
    ) -> None:
        """Reply with the parameters ``flat``, float32 of shape (n,), as ``encode`` has them.

        ``flat`` must not change until it is sent: large parts are not copied.
        """
        is_difference = isinstance(message, messages.PushReply) and message.is_difference
        chunks, inline = split(flat, message.version, encode, is_difference=is_difference)
        for chunk, part in chunks or ():
            self.reply(chunk, part)
        self.reply(message, inline)

    def refuse(self, error: ZmqTrainError) -> None:
        """Reply with an error, unless the sender asked for no reply."""
        if self.envelope.request_id:
            self.reply(refusal_of(error))

    def send(self, message: messages.Message, tensors: tuple[Tensor, ...] = ()) -> None:
        """Send the sender a message that is not a reply to this request."""
        self._actor.send(self.endpoint, message, 0, tensors, self.peer)


class Actor(ABC):
    """Base of the roles. A subclass fills ``handlers`` by message type and implements ``main``."""

    def __init__(self, task: Task, transport: Transport, metrics: Metrics, timing: Timing) -> None:
        self.task = task
        self.transport = transport
        self.metrics = metrics
        self.timing = timing
        self.incarnation = 0
        self.generation = 0
        self.waits = Waits(str(task))
        self.handlers: dict[type, Callable[[Request, Any], None]] = {}
        self.links: list[Link] = []
        self.stopping = asyncio.Event()
        self.stop_code = 0
        self.signalled_at = math.inf  # monotonic time of the first signal to end
        # Whether unsent messages still go out after a failure; to a lost host that takes seconds.
        self.lingers = True
        self._listeners: list[Endpoint] = []
        self._background: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._crash: Exception | None = None  # the first one
        self._at_start: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._refusals: deque[str] = deque(maxlen=REFUSALS)  # logged as warnings

    @abstractmethod
    async def main(self) -> int:
        """Do the role's work; return the exit code."""

    def on_end(self, error: BaseException | None) -> None:
        """Free the actor's resources when it ends; ``error`` is the reason if it failed."""

    async def run(self) -> int:
        """Run ``main`` and all background tasks; the first failure ends all of them."""
        error: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as self._group:
                for begin in self._at_start:
                    self.spawn(begin())
                try:
                    return await self.main()
                except BaseException:
                    # New requests must reach the next life of this task.
                    self._stop_listening(discard=not self.lingers)
                    raise
                finally:
                    for task in self._background:
                        task.cancel()
        except BaseExceptionGroup as group:
            errors = leaves_of(group)
            if self._crash is not None and self._crash not in errors:
                errors.append(self._crash)  # another failure came before its task ran
            error = main_of(errors)
            for other in errors:
                if other is not error and not isinstance(other, ZmqTrainError):
                    self._log_other(other)
            raise error from error.__cause__
        except BaseException as stop:
            error = stop
            if self._crash is not None:
                self._log_other(self._crash)
            raise
        finally:
            try:
                self.on_end(error)
            finally:
                discard = isinstance(error, PeerLostError) and not self.lingers
                for link in self.links:
                    link.close(discard=discard)
                self._stop_listening()

    def stop(self, exit_code: int) -> None:
        """Ask the actor to end, on a signal or a Shutdown; the first call decides the exit code."""
        if not self.stopping.is_set():
            self.stop_code = exit_code
            self.stopping.set()

    def add_background_task(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a background task when the actor starts."""
        self._at_start.append(begin)

    def crash(self, error: Exception) -> None:
        """End the actor with the error of a callback; it handles no further message."""
        if self._crash is None and self.spawn(_raise(error), outlives_main=True):
            self._crash = error
        else:
            self._log_other(error)

    def _log_other(self, error: BaseException) -> None:
        text = "%s met another error while it ended: %s"
        if isinstance(error, ZmqTrainError):  # often a consequence of the first error
            log.info(text, self.task, error)
        else:
            log.error(text, self.task, error, exc_info=error)

    def spawn(self, coroutine: Coroutine[Any, Any, None], *, outlives_main: bool = False) -> bool:
        """Run a background task while the actor lives; return False if it is ending."""
        if self._group is None:
            raise RuntimeError("spawn is for a running actor")
        try:
            task = self._group.create_task(coroutine)
        except RuntimeError:
            coroutine.close()
            return False
        if not outlives_main:
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        return True

    def listen(self, address: str, high_water_mark: int = HIGH_WATER_MARK) -> Endpoint:
        """Bind ``address`` and dispatch its messages until the actor ends."""
        endpoint = self.transport.bind(address, high_water_mark)
        self._listeners.append(endpoint)
        endpoint.start(partial(self._receive, endpoint))
        endpoint.on_failure(lambda text, _: self._on_refused(text))
        return endpoint

    def _stop_listening(self, *, discard: bool = False) -> None:
        for listener in self._listeners:
            listener.close(discard=discard)

    def link(self, peer: Task, address: str) -> Link:
        """Connect to a ps and exchange heartbeats with it."""
        link = Link(str(peer), self.transport.connect(address), self)
        self.links.append(link)
        self.spawn(link.beat())
        return link

    def on_message(self, endpoint: Endpoint, envelope: Envelope) -> None:
        """Handle a message that came over a link and is not a reply."""
        self._dispatch(Request(self, endpoint, b"", envelope))

    def abandon_life(self, error: ZmqTrainError) -> None:
        """Fail all requests on all links: a peer no longer knows this incarnation."""
        for link in self.links:
            link.abandon(error)

    def identify(self) -> tuple[Sender, int]:
        """Return (this life of this task, its generation) for an envelope's label."""
        return Sender(self.task.role, self.task.index, self.incarnation), self.generation

    def owner_of(self, sender: Sender) -> Owner:
        return Owner(sender.role, sender.index)

    def heartbeat(self) -> messages.Heartbeat:
        self.metrics.connected_peers["ps"].set(sum(link.is_alive for link in self.links))
        return messages.Heartbeat(waits=self.waits.snapshot())

    def send(
        self,
        endpoint: Endpoint,
        message: messages.Message,
        request_id: int,
        tensors: tuple[Tensor, ...],
        peer: RoutingId,
    ) -> None:
        """Send one envelope. A lost one raises nothing: leases and resends handle it."""
        self._transmit(endpoint, self._encoded(message, request_id, tensors), peer)

    def send_to_all(self, contacts: Iterable[Request], message: messages.Message) -> None:
        """Send a message, encoded once, to the senders of these requests; it is not a reply."""
        frames = self._encoded(message, 0, ())
        for contact in contacts:
            self._transmit(contact.endpoint, frames, contact.peer)

    def _encoded(
        self, message: messages.Message, request_id: int, tensors: tuple[Tensor, ...]
    ) -> Sequence[Buffer]:
        sender, generation = self.identify()
        envelope = Envelope(message, sender, request_id, generation, tensors)
        log.debug("-> %s", envelope)
        return encode(envelope)

    def _transmit(self, endpoint: Endpoint, frames: Sequence[Buffer], peer: RoutingId) -> None:
        self.metrics.bytes_sent.inc(sum(map(len, frames)))
        try:
            endpoint.send(frames, peer)
        except UnreachableError as error:
            log.debug("not sent: %s", error)

    def _receive(self, endpoint: Endpoint, peer: RoutingId, frames: Sequence[Buffer]) -> None:
        self.metrics.bytes_received.inc(sum(map(len, frames)))
        try:
            envelope = decode(frames)
        except ProtocolError as error:
            self.metrics.decode_errors.inc()
            log.warning("refused a message: %s", error)
            refusal = refusal_of(error)
            self.send(endpoint, refusal, request_id_of(frames), (), peer)
            return
        request = Request(self, endpoint, peer, envelope)
        try:
            if type(peer) is KnownPeer and not may_ask_for_a_client(envelope):
                check_identity(peer.key.owner, envelope.sender, self.owner_of(envelope.sender))
            check_permission(envelope)
        except RefusedError as error:
            self.on_stranger(request, error)
            return
        self._dispatch(request)

    def on_stranger(self, request: Request, error: RefusedError) -> None:
        """Handle a message that its sender's key or role does not allow."""
        self._on_refused(str(error))
        request.refuse(error)

    def _on_refused(self, reason: str) -> None:
        """Count a refusal; log each reason once, since refused peers try again."""
        self.metrics.auth_failures.inc()
        is_known = reason in self._refusals
        log.log(logging.DEBUG if is_known else logging.WARNING, "refused: %s", reason)
        if not is_known:
            self._refusals.append(reason)

    def _dispatch(self, request: Request) -> None:
        """Call the handler. A bad request affects only its sender; a bug ends this actor."""
        log.debug("<- %s", request.envelope)
        kind = type(request.envelope.message)
        if kind is messages.Refusal or self._crash is not None:
            return  # refusing a refusal would never end; a crash may have left a change half done
        handler = self.handlers.get(kind)
        try:
            if handler is None:
                raise ProtocolError(f"{self.task} takes no {kind.__name__} from {request.sender}")
            handler(request, request.envelope.message)
        except ZmqTrainError as error:
            # Heartbeats repeat every second. The job waits for a task that cannot join.
            levels = {messages.Heartbeat: logging.DEBUG, messages.Join: logging.WARNING}
            level = levels.get(kind, logging.INFO)
            log.log(level, "refused %s of %s: %s", kind.__name__, request.sender, error)
            request.refuse(error)
        except Exception as error:
            self.crash(error)


def guarded(
    call: Callable[[*Arguments], object], on_error: Callable[[Exception], None]
) -> Callable[[*Arguments], None]:
    """Wrap a callback of an event loop, which only logs errors: they go to ``on_error``."""

    def guard(*arguments: *Arguments) -> None:
        try:
            call(*arguments)
        except Exception as error:
            on_error(error)

    return guard


async def _raise(error: Exception) -> None:
    raise error


def main_of(errors: Sequence[BaseException]) -> BaseException:
    """Return the main one of some errors: one raised on purpose comes before any other."""
    return next((error for error in errors if isinstance(error, ZmqTrainError)), errors[0])


def leaves_of(error: BaseException) -> list[BaseException]:
    """Return the errors in a group and in the groups in it."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves_of(each)]
    return [error]
