"""The tasks that have joined a ps: the current life of each, and its contact."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from zmqtrain.actors.actor import Request
from zmqtrain.actors.process_identity import has_ended
from zmqtrain.config.cluster import Role
from zmqtrain.coordination.statistics import Staleness
from zmqtrain.errors import FencedError, ProtocolError, RefusedError
from zmqtrain.protocol.status import Progress, Wait
from zmqtrain.wire.codec import Sender
from zmqtrain.wire.messages import Join, ShardReport

log = logging.getLogger(__name__)

AHEAD_MS = 10 * 365 * 86_400_000
"""Most that one host's clock may be ahead of another's: bounds the incarnations of peers."""

Name = tuple[str, int]
"""Role and index."""

A_WORKER = "a worker to join"  # the peer in a wait if no worker is alive
NAMED = 3  # workers named in a wait for more


def names_of(workers: Sequence[int], first: Sequence[int] = ()) -> str:
    """Return the names of at most ``NAMED`` workers, ``first`` before others, and the number left.

    A thousand workers may have a thousand waits.
    """
    order = [worker for worker in first if worker in workers]
    order += islice((worker for worker in workers if worker not in order), NAMED)
    names = [f"worker {worker}" for worker in order[:NAMED]]
    more = len(workers) - len(names)
    return ", ".join([*names, f"and {more} more"] if more else names)


@dataclass(slots=True)
class Peer:
    """One task that has joined. Times are of the monotonic clock."""

    name: Name
    incarnation: int
    nonce: str
    process: str
    metrics: str
    process_identity: str
    contact: Request | None  # the last request, for messages that are not replies
    heard_at: float
    gone: bool = False  # it left, or its lease expired
    left: bool = False  # it has sent a Leave
    died: bool = False  # its process has ended without a Leave
    lanes: str = "tcp"  # to every ps, as a worker reports them
    pushes: int = 0  # of a worker to the leader's host, from ``joined_at`` on
    joined_at: int = 0  # the pushes of the slowest worker at its join
    loss: float = 0.0  # of the last of them
    finished: bool = False  # a worker: sent a stop, and answered by all shards
    saved_step: int = 0  # the chief: of its last checkpoint
    report: ShardReport | None = None  # of another ps, its last in this generation
    waits: tuple[Wait, ...] = ()
    phases_s: tuple[float, ...] = ()  # of a worker, as in its last heartbeat
    progress: Progress = field(default_factory=Progress)  # the same
    staleness: Staleness = field(default_factory=Staleness)  # of a worker's gradients
    restarts: int = 0  # of its process

    def __str__(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def role(self) -> str:
        return self.name[0]

    @property
    def index(self) -> int:
        return self.name[1]

    @property
    def is_worker(self) -> bool:
        return self.role == Role.WORKER

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard_at

    @property
    def is_missing(self) -> bool:
        """Whether it is gone, and may be alive elsewhere."""
        return self.gone and not self.left and not self.died

    @property
    def orders(self) -> int:
        """Number of the last order of this generation that a ps has reported as carried out."""
        return self.report.orders if self.report is not None else 0

    @property
    def is_revoked(self) -> bool:
        """Whether its key was revoked since its last request."""
        return self.contact is not None and self.contact.is_revoked

    def is_of_process(self, nonce: str) -> bool:
        """Return whether the process of this nonce is the peer's, even in another life."""
        return self.nonce.partition("/")[0] == nonce.partition("/")[0]

    @property
    def absence(self) -> str:
        """The reason why it counts as gone."""
        if self.is_revoked:
            return "has lost its key"
        if self.died:
            return "has died"
        return f"has been silent for {self.silent_s:.1f} s"


class PeerTable:
    """The tasks that have joined; admits them and fences their earlier lives."""

    def __init__(self, lease_s: float, ps: int, has_died: Callable[[Peer], bool]) -> None:
        """``has_died`` may know for certain that a peer's process has ended."""
        self._has_died = has_died
        # Limits of the indices by role; there may be more workers than expected.
        self._limits: dict[str, int] = {Role.PS: ps, Role.CHIEF: 1, Role.WORKER: sys.maxsize}
        self._lease_s = lease_s
        self._peers: dict[Name, Peer] = {}
        self._incarnations: dict[Name, int] = {}  # the last one given or seen
        self.newest = 0  # incarnation of any task
        self.is_closed = False  # to processes that have not joined before
        self._contested: dict[Name, tuple[Request, float]] = {}  # joins that wait for a lease

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._peers.values()))

    def workers(self) -> Iterator[Peer]:
        return (peer for peer in self if peer.is_worker and not peer.gone)

    def get(self, role: str, index: int) -> Peer | None:
        return self._peers.get((role, index))

    def restore(self, peer: Peer) -> None:
        """Add a task that had joined the process before this one."""
        self._peers[peer.name] = peer
        self._incarnations[peer.name] = peer.incarnation
        self.outlive(peer.incarnation)

    def outlive(self, incarnation: int) -> None:
        """Give every new life a higher incarnation than this, even if the clock went back."""
        self.newest = max(incarnation, self.newest)

    def member(self, request: Request) -> Peer:
        """Return the sender's entry and renew its lease.

        Raises:
            FencedError: the sender is not the current life of a task that has joined.
        """
        sender = request.sender
        peer = self._peers.get((sender.role, sender.index))
        if peer is None or peer.incarnation != sender.incarnation or peer.gone:
            raise FencedError(f"{sender} (incarnation {sender.incarnation}) has not joined")
        peer.heard_at = time.monotonic()
        peer.contact = request
        return peer

    def join(self, request: Request, message: Join) -> Peer | None:
        """Admit the sender; return None while its index is taken or this ps leaves.

        Raises:
            RefusedError: an older life joins after a newer one, or the cluster has no such task.
            ProtocolError: it claims an impossible incarnation.
        """
        sender = request.sender
        if not 0 <= sender.index < self._limits.get(sender.role, 0):
            raise RefusedError(f"the cluster has no {sender}")
        latest = time.time() * 1000 + AHEAD_MS
        wrong = [n for n in (sender.incarnation, message.after) if not 0 <= n < latest]
        if wrong:
            raise ProtocolError(
                f"{sender} claims incarnation {wrong[0]}: not a number of milliseconds since "
                "1970, or the clocks of two hosts are years apart"
            )
        name = (sender.role, sender.index)
        peer = self._peers.get(name)
        if self.is_closed and (peer is None or not peer.is_of_process(message.nonce)):
            return None  # it waits for the next life of this ps
        if peer is not None and peer.nonce == message.nonce and not peer.gone:
            peer.heard_at, peer.contact = time.monotonic(), request
            return peer  # a resend
        if peer is not None and self._is_held(peer, message):
            first = self._contested.get(name, (request, time.monotonic()))[1]
            self._contested[name] = (request, first)
            return None
        return self._admit(request, message, sender, name)

    def may_replace(self, peer: Peer, request: Request) -> bool:
        """Return whether the sender may be a later life of this peer that has not joined yet."""
        is_later = request.sender.incarnation > peer.incarnation
        is_same = peer.contact is not None and peer.contact.peer == request.peer
        return is_later and (is_same or peer.gone or self._is_lost(peer))

    def _is_held(self, peer: Peer, message: Join) -> bool:
        """Return whether another live process has this index."""
        if peer.gone or peer.is_of_process(message.nonce):
            return False
        return not self._is_lost(peer)

    def expired(self) -> list[Peer]:
        """Mark and return the workers whose lease ran out, and tasks whose key was revoked."""
        here = [peer for peer in self if not peer.gone]
        late = [
            peer for peer in here if peer.is_revoked or (peer.is_worker and self._is_lost(peer))
        ]
        for peer in late:
            peer.gone = True
        return late

    def _is_lost(self, peer: Peer) -> bool:
        peer.died = peer.died or self._has_died(peer) or has_ended(peer.process_identity)
        return peer.died or peer.silent_s >= self._lease_s

    def resolve_contested(self) -> list[Request]:
        """Return the joins whose index became free; refuse those that have waited two leases."""
        free = []
        for name, (request, since) in list(self._contested.items()):
            peer = self._peers[name]
            if peer.gone or self._is_lost(peer):
                del self._contested[name]
                free.append(request)
            elif time.monotonic() - since > 2 * self._lease_s:
                del self._contested[name]
                remedy = (
                    "there can be only one, so end one of them"
                    if name[0] == Role.CHIEF
                    else "give every task an index of its own (--index, TF_CONFIG's task index)"
                )
                request.refuse(RefusedError(f"{peer} is alive already ({peer.process}): {remedy}"))
        return free

    def renew_all(self) -> None:
        """Restart all leases: this process itself was suspended."""
        now = time.monotonic()
        for peer in self:
            peer.heard_at = now
        for name, (request, _) in self._contested.items():
            self._contested[name] = (request, now)

    def forget_workers(self) -> None:
        """Mark all workers as gone: a new generation begins, and they join again."""
        for peer in self:
            if peer.is_worker:
                peer.gone = True

    def _admit(self, request: Request, message: Join, sender: Sender, name: Name) -> Peer:
        known = self._incarnations.get(name, 0)
        if sender.incarnation and sender.incarnation < known:
            raise RefusedError(f"{sender} has a newer life already: this one is over")
        # Milliseconds, so that incarnations rise even if this ps forgets earlier ones.
        before = max(self.newest, message.after)
        incarnation = sender.incarnation or max(before + 1, int(time.time() * 1000))
        self._incarnations[name] = incarnation
        self.outlive(incarnation)
        earlier = self._peers.get(name)
        peer = self._peers[name] = Peer(
            name=name,
            incarnation=incarnation,
            nonce=message.nonce,
            process=message.process,
            metrics=message.metrics,
            process_identity=message.process_identity,
            contact=request,
            heard_at=time.monotonic(),
        )
        if earlier is not None:
            peer.restarts = earlier.restarts + (not earlier.is_of_process(message.nonce))
        log.info("%s joined (%s, incarnation %d)", peer, peer.process, incarnation)
        return peer
