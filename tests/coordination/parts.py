"""A leader and what it is given, in memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from simulation.model import counting_job
from tests.asking import Asked
from tests.plans import planned
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


def make_host(
    *,
    shards: int = 1,
    crash: Callable[[Any], None] = fail,
    spawn: Callable[[Any], bool] = lambda coroutine: True,
    **fields: Any,
) -> Any:
    """Return what its parts need of a ps, whose job has 10 steps and expects two workers."""
    usual = {"policy": "hogwild", "steps": 10, "seed": 1, "logdir": "runs"}
    job = counting_job(shards, frozenset(), **usual | fields)
    return SimpleNamespace(
        job=job,
        plan=planned(job, ps=shards, workers=2),
        timing=TIMING,
        metrics=Metrics("ps"),
        traces=None,
        lane="tcp",
        fingerprint={},
        crash=crash,
        spawn=spawn,
        send_to_all=send_to_all,
    )


def make_leader(
    host: Any = None,
    *,
    segment: Segment | None = None,
    peers: PeerTable | None = None,
    carry_out: Callable[[Sequence[Numbered]], None] = ignore,
    has_board: bool = False,
    on_change: Callable[[], None] = nothing,
    **fields: Any,
) -> Leader:
    """Return the leader of a ``host``, or of one with these fields."""
    host = host or make_host(**fields)
    peers = peers or PeerTable(5.0, host.plan.shards, lambda peer: False)
    segment = segment or Segment.private(SegmentLayout(4, []))
    board = NoBoard() if has_board else None
    return Leader(host, peers, segment, carry_out, on_change=on_change, board=board)


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
