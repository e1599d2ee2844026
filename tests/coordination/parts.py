"""A leader and what it is given, in memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from simulation.model import counting_job
from tests.asking import Asked
from zmqtrain.actors.actor import Request
from zmqtrain.config.timing import Timing
from zmqtrain.coordination.events import PullArrived, Stepped
from zmqtrain.coordination.leader import Leader, nothing
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.peers import Peer, PeerTable
from zmqtrain.coordination.status import HostStatus
from zmqtrain.observe.metrics import Metrics
from zmqtrain.protocol.orders import Numbered
from zmqtrain.protocol.status import TaskStatus
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import SegmentLayout
from zmqtrain.wire.messages import Message

TIMING = Timing(join_timeout_s=20.0)


def ignore(orders: Sequence[Numbered]) -> None:
    """Nobody is there to carry them out."""


def add_peer(peers: PeerTable, name: str, **fields: Any) -> Peer:
    """Let a task in, whose life is number 1."""
    role, index = name.split()
    nonce = f"{name}/1"
    request = Asked(sender=name, incarnation=1)
    peer = Peer((role, int(index)), 1, nonce, "host:1", "", "", request, time.monotonic())
    for field, value in fields.items():
        setattr(peer, field, value)
    peers.restore(peer)
    return peer


def send_to_all(contacts: Iterable[Request], message: Message) -> None:
    for contact in contacts:
        contact.send(message)


def fail(error: Exception) -> None:
    raise error


def host() -> HostStatus:
    """Return the status of a leader's host."""
    task = TaskStatus("ps", 0, "serving", 0, 0, 0.0, (), math.nan, "host:1", "", "", 16)
    return HostStatus(task, (), 0, time.monotonic())


class NoBoard:
    """A board whose roster goes on: its workers have not come to their next word."""

    def halt(self, worker: int | None = None) -> Stepped | None:
        return None

    def close(self) -> None:
        """Nothing lies on it."""


def make_leader(
    *,
    policy: str = "hogwild",
    shards: int = 1,
    segment: Segment | None = None,
    peers: PeerTable | None = None,
    carry_out: Callable[[Sequence[Numbered]], None] = ignore,
    has_board: bool = False,
    on_change: Callable[[], None] = nothing,
    evaluate_every: int = 0,
) -> Leader:
    """Return the leader of a job of 10 steps, in which two workers are expected."""
    segment = segment or Segment.private(SegmentLayout(4, []))
    peers = peers or PeerTable(5.0, shards, lambda peer: False)
    fields = {"policy": policy, "steps": 10, "seed": 1, "evaluate_every": evaluate_every}
    return Leader(
        counting_job(shards, frozenset(), **fields),
        peers,
        segment,
        Metrics("ps"),
        TIMING,
        shards=shards,
        workers=2,
        carry_out=carry_out,
        send_to_all=send_to_all,
        crash=fail,
        on_change=on_change,
        board=NoBoard() if has_board else None,
    )


def begun_leader(*, workers: Sequence[int] = (), **fields: Any) -> Leader:
    """Return a leader whose job has begun, and these workers have joined and pulled."""
    leader = make_leader(**fields)
    leader.begin(1, 0, Ledger())
    for worker in workers:
        leader.joined(add_peer(leader.peers, f"worker {worker}"))
    for worker in workers:
        leader.arrived(PullArrived(worker))
    return leader


def leader_with_a_roster(*, segment: Segment | None = None) -> Leader:
    """Return a leader whose two workers make steps by themselves."""
    leader = make_leader(policy="sync-replicas", segment=segment, has_board=True)
    begin_with_a_roster(leader)
    return leader


def begin_with_a_roster(leader: Leader) -> None:
    for worker in (0, 1):
        add_peer(leader.peers, f"worker {worker}")
    leader.begin(1, 0, Ledger())
    for worker in (0, 1):
        leader.arrived(PullArrived(worker, on_board=True))
    assert leader.coordinator.roster is not None
