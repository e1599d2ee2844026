"""Watches the messages between workers and ps, and objects to invalid ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from simulation.network import Connection, Frames
from zmqtrain.config.cluster import Role
from zmqtrain.wire.codec import Envelope, decode
from zmqtrain.wire.control import Close, Initialize
from zmqtrain.wire.messages import Join, PullReply, Push, PushReply

COUNTED = frozenset({"applied", "accumulated"})
"""Results of a push that is part of the parameters."""

_KINDS = frozenset({b"Close", b"Initialize", b"Join", b"Push", b"PullReply", b"PushReply"})

Life: TypeAlias = tuple[str, int]
"""A worker's name and incarnation."""


@dataclass(slots=True)
class _Exchange:
    """The pushes and results between one life of a worker and one shard."""

    last: int = 0  # sequence of the last push
    batches: dict[int, int] = field(default_factory=dict)  # sequence -> batch
    results: dict[int, str] = field(default_factory=dict)  # sequence -> result


class MessageMonitor:
    """Sees every message when it is sent.

    ``counted``: batches that the leader has acknowledged as counted, by generation.
    ``lives``: names and nonces of the workers that joined. ``hurried``: whether a chief ended the
    job without waiting for workers that compute.
    """

    def __init__(
        self, object_to: Callable[[str], None], on_push: Callable[[Connection], None]
    ) -> None:
        """``object_to`` gets a text for each invalid message. ``on_push``: before each new push."""
        self._on_push = on_push
        self.counted: dict[int, set[int]] = {}
        self.lives: set[tuple[str, str]] = set()
        self.hurried = False
        self._object = object_to
        self._exchanges: dict[tuple[Life, str], _Exchange] = {}
        self._asked: dict[tuple[Connection, int], tuple[Life, int]] = {}  # request -> push
        self._versions: dict[tuple[int, int], int] = {}  # ps, generation -> last version told
        self._chiefs: dict[tuple[int, int], int] = {}  # life of the chief that began it

    def saw(self, connection: Connection, up: bool, frames: Frames) -> bool:
        """Check a sent message; return whether it lets a worker go on."""
        header = frames[0]
        # The third element, a short string, is the message's kind; most kinds are skipped.
        if bytes(header[3 : 3 + (header[2] & 0x1F)]) not in _KINDS:
            return False
        envelope = decode(frames)
        if up and isinstance(envelope.message, Join):
            if envelope.sender.role == Role.WORKER:
                self.lives.add((str(envelope.sender), envelope.message.nonce))
        elif up and isinstance(envelope.message, Close):
            self.hurried |= envelope.message.at_once
        elif up and isinstance(envelope.message, Initialize):
            self._begins(connection, envelope)
        elif up and isinstance(envelope.message, Push):
            self._pushed(connection, envelope, envelope.message)
        elif not up and isinstance(envelope.message, PullReply | PushReply):
            self._released(envelope, envelope.message)
            if isinstance(envelope.message, PushReply):
                self._answered(connection, envelope, envelope.message)
            return True
        return False

    def began_by(self, ps: int, generation: int) -> int:
        """Return the life of the chief that began a generation of a ps, 0 if it is not known."""
        return self._chiefs.get((ps, generation), 0)

    def _begins(self, connection: Connection, envelope: Envelope) -> None:
        """Note the begin of a generation; a job that is lost everywhere begins as 1 again."""
        ps = int(_ps_of(connection).split()[1])  # of its process, which may be a worker
        generation, chief = (ps, envelope.generation), envelope.sender.incarnation
        if self._chiefs.setdefault(generation, chief) != chief:
            self._chiefs[generation] = chief
            self._versions.pop(generation, None)

    def _pushed(self, connection: Connection, envelope: Envelope, push: Push) -> None:
        life = (connection.end.process.name, envelope.sender.incarnation)
        self._asked[connection, envelope.request_id] = (life, push.sequence)
        exchange = self._exchanges.setdefault((life, _ps_of(connection)), _Exchange())
        if push.sequence > exchange.last:
            self._on_push(connection)
        if push.sequence > exchange.last + 1:
            self._object(f"{life} sends push {push.sequence} after push {exchange.last}")
        exchange.last = max(exchange.last, push.sequence)
        if exchange.batches.setdefault(push.sequence, push.batch) != push.batch:
            self._object(f"push {push.sequence} of {life} changes its batch to {push.batch}")

    def _released(self, envelope: Envelope, reply: PullReply | PushReply) -> None:
        generation = envelope.sender.index, envelope.generation
        if reply.version < self._versions.get(generation, 0):
            before = self._versions[generation]
            self._object(f"{envelope.sender} is at version {reply.version} after {before}")
        self._versions[generation] = reply.version

    def _answered(self, connection: Connection, envelope: Envelope, reply: PushReply) -> None:
        life, sequence = self._asked[connection, envelope.request_id]
        if reply.sequence != sequence:
            self._object(f"{envelope.sender} answers push {sequence} with {reply}")
        exchange = self._exchanges[life, _ps_of(connection)]
        if exchange.results.setdefault(sequence, reply.result) != reply.result:
            first = exchange.results[sequence]
            self._object(f"push {sequence} of {life} was {first}, now it is {reply.result}")
        if reply.result not in COUNTED | {"dropped", "refused"}:
            self._object(f"push {sequence} of {life} is answered: {reply.result!r}")
        if reply.result == "dropped" and not reply.reason:
            self._object(f"push {sequence} of {life} is dropped without a reason")
        if envelope.sender.index == 0 and reply.result in COUNTED:
            self.counted.setdefault(envelope.generation, set()).add(exchange.batches[sequence])


def _ps_of(connection: Connection) -> str:
    """Return the listening task; a worker may have two connections to it."""
    return connection.listener.process.name if connection.listener is not None else ""
