"""Passes over the data: each counts every batch once, then all workers wait to be sent on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.coordination.plays import coordinator, playing
from zmqtrain.coordination.events import Joined, Left, PullArrived, PushArrived
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.state import pack, unpack
from zmqtrain.protocol.orders import Answer, Order
from zmqtrain.wire.control import Extend

ENDLESS, EXAMPLES = 1 << 40, 10


PLAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing is leased before the first pass begins":
    ("hogwild", {"joined": 2, "steps": ENDLESS, "ledger": Ledger(limit=0)}, """
        pull 0        -> -
        pull 1        -> -
        held          -> -
        extend 3      -> switch hogwild, answer 0 with 0, answer 1 with 1
        push 1 1 1    -> apply 1, answer 1 with 2
        push 0 1 0    -> apply 0
        held          -> 0 waits for 1
        push 1 2 2    -> apply 1
        held          -> -
        .is_pass_over -> True
        extend 6      -> switch hogwild, answer 0 with 3, answer 1 with 4
    """),
    "last step of a pass ends with the gradients that are there":
    ("sync-replicas:aggregate=4", {"joined": 2, "steps": ENDLESS, "ledger": Ledger(limit=2)}, """
        pull 0                -> -
        pull 1                -> answer 0 with 0, answer 1 with 1
        push 0 1 0            -> accumulate 0
        push 1 1 1            -> accumulate 1, reduce, switch sync-replicas:aggregate=4
        extend 4              -> switch sync-replicas:aggregate=4, answer 0 with 2, answer 1 with 3
        .ledger.pass_examples -> 0
    """),
    "batch of a worker that dies belongs to its pass":
    ("sync-replicas", {"joined": 2, "steps": ENDLESS, "ledger": Ledger(limit=2)}, """
        pull 0        -> -
        pull 1        -> answer 0 with 0, answer 1 with 1
        push 0 1 0    -> -
        leave 1       -> reduce 0, answer 0 with 1
        push 0 2 1    -> reduce 0
        .is_pass_over -> True
    """),
    "limit raised during a pass holds no worker":
    ("sync-replicas", {"joined": 2, "steps": ENDLESS, "ledger": Ledger(limit=2)}, """
        pull 0     -> -
        pull 1     -> answer 0 with 0, answer 1 with 1
        extend 4   -> -
        extend 4   -> -
        push 0 1 0 -> -
        push 1 1 1 -> reduce 0 1, answer 0 with 2, answer 1 with 3
    """),
    "run may be closed between two passes":
    ("hogwild", {"joined": 1, "workers": 1, "steps": ENDLESS, "ledger": Ledger(limit=1)}, """
        pull 0     -> answer 0 with 0
        push 0 1 0 -> apply 0
        close      -> answer 0 stop
        .finished  -> True
    """),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "fields", "script"), PLAYS.values(), ids=PLAYS)
def test_orders_are_those_of_the_play(policy: str, fields: dict[str, Any], script: str) -> None:
    playing(coordinator(policy, **fields))(script)


POLICIES = [
    *("hogwild", "bounded-staleness:0", "bounded-staleness:2", "sync-replicas"),
    *("sync-replicas:aggregate=1", "sync-replicas:aggregate=3", "sync-replicas:aggregate=5"),
    *("sync-replicas:aggregate=2,tokens=1", "local-steps:3", "local-steps:2,after=2"),
    *("local-steps:3,async", "local-steps:2,async,bound=0,after=2"),
]


class Cluster:
    """Workers that compute what they are released with, in the order that a test chooses."""

    def __init__(self, spec: str, workers: int, lookahead: int) -> None:
        ledger = Ledger(limit=0)
        self.run = coordinator(
            spec, workers=workers, steps=ENDLESS, lookahead=lookahead, ledger=ledger
        )
        self.has: dict[int, list[int]] = {}
        self.computing: dict[int, int] = {}  # worker -> number of batches of its next push
        self.skipped: set[int] = set()
        self.sequences = dict.fromkeys(range(workers), 0)
        self.lives = dict.fromkeys(range(workers), 0)
        for worker in range(workers):
            self.join(worker)

    def join(self, worker: int) -> None:
        self.lives[worker] += 1
        self.sequences[worker] = 0
        self.has[worker] = []
        self.carry_out(self.run.handle(Joined(worker, self.lives[worker])))
        self.carry_out(self.run.handle(PullArrived(worker)))

    def die(self, worker: int) -> None:
        self.computing.pop(worker)
        self.carry_out(self.run.handle(Left(worker)))
        self.join(worker)

    def push(self, worker: int) -> None:
        self.report(worker, self.computing.pop(worker))

    def push_nan(self, worker: int, count: int = 1) -> None:
        """Report the first batch of a round alone; a worker goes on with the others."""
        self.computing.pop(worker)
        self.skipped.update(self.has[worker][:count])
        self.report(worker, count, finite=False)

    def push_nan_round(self, worker: int) -> None:
        self.push_nan(worker, self.computing[worker])

    def report(self, worker: int, count: int, *, finite: bool = True) -> None:
        self.sequences[worker] += 1
        batches, self.has[worker] = self.has[worker][:count], self.has[worker][count:]
        loss, sums = sum(batches) / count, {"batches": float(sum(batches))}
        told = self.sequences[worker], batches[0], EXAMPLES * count, finite, loss, sums
        self.carry_out(self.run.handle(PushArrived(worker, *told, batches=count)))

    def carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Answer) and not order.stop:
                self.has[order.worker] += order.batches
                self.computing[order.worker] = order.local_steps or 1
                assert len(self.has[order.worker]) >= self.computing[order.worker]


ACTS = [*(Cluster.push,) * 3, Cluster.push_nan, Cluster.push_nan_round, Cluster.die]


@pytest.mark.parametrize("spec", POLICIES)
@given(
    workers=st.integers(1, 4),
    lookahead=st.integers(0, 2),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    choices=st.lists(st.tuples(st.integers(0, 100), st.sampled_from(ACTS)), max_size=30),
)
def test_every_pass_counts_its_batches_once_whoever_dies(
    spec: str, workers: int, lookahead: int, sizes: list[int], choices: list[tuple[int, Any]]
) -> None:
    cluster = Cluster(spec, workers, lookahead)
    limit = 0
    for size in sizes:
        limit += size
        cluster.carry_out(cluster.run.handle(Extend(limit)))
        while not cluster.run.is_pass_over:
            assert cluster.computing, "nobody computes, and the pass is not over"
            choice, act = choices.pop() if choices else (0, Cluster.push)
            worker = sorted(cluster.computing)[choice % len(cluster.computing)]
            (Cluster.push if act is Cluster.die and "tokens" in spec else act)(cluster, worker)
            ledger = cluster.run.ledger
            leased = [*ledger.leases.values(), *ledger.pending.values()]
            assert ledger.outstanding == sum(map(len, leased))
        counted = set(range(limit - size, limit)) - cluster.skipped
        assert (ledger.next_batch, ledger.open_batches()) == (limit, ())
        assert ledger.pass_examples == EXAMPLES * len(counted)
        assert ledger.pass_sums == ({"batches": sum(counted)} if counted else {})
        if counted:
            assert ledger.mean_loss == pytest.approx(sum(counted) / len(counted))
        assert ledger.examples == EXAMPLES * (limit - len(cluster.skipped))
        if spec == "local-steps:3,async":
            assert cluster.run.version == limit - len(cluster.skipped)
        assert not cluster.computing
        cluster.run = unpack(pack(cluster.run))
