"""The leader: its events in the journal, its orders to the host, and when all is delivered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.asking import Asked
from tests.clock import StopClock
from tests.constants import Constants
from tests.coordination.parts import add_peer, begun_leader, leader_with_a_roster, make_leader
from zmqtrain.coordination import leader as leader_module
from zmqtrain.coordination import waiting
from zmqtrain.coordination.events import Measured, PullArrived, PushArrived, Stepped
from zmqtrain.coordination.leader import Leader
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.coordination.worker_watch import WorkerWatch
from zmqtrain.errors import ExitCode, FencedError, ProtocolError
from zmqtrain.policies.sync_replicas import TokenSyncReplicas
from zmqtrain.protocol.orders import Answer, Apply, Measure, Numbered, Reduce, Snapshot
from zmqtrain.store import journal as journals
from zmqtrain.store.journal import Journal
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import GENERATION, ORDERS, SegmentLayout
from zmqtrain.wire.control import Extend, Save, SwitchPolicy
from zmqtrain.wire.messages import Arrived, ShardReport

REPORT = ShardReport(0, 0, 16)


def kinds(orders: Sequence[Numbered]) -> list[type]:
    return [type(order) for _, order in orders]


@pytest.fixture
def peers() -> PeerTable:
    return PeerTable(5.0, 2, lambda peer: False)


async def test_arrival_at_the_host_gives_it_the_orders_that_follow(peers: PeerTable) -> None:
    add_peer(peers, "worker 0")
    leader = begun_leader(peers=peers)
    assert kinds(leader.arrived(PullArrived(0))) == [Answer]
    assert leader.holds_lease(0, 0) and not leader.holds_lease(0, 9)
    assert kinds(leader.arrived(PushArrived(0, 1, 0, 1))) == [Apply, Answer]
    assert leader.step == 1


async def test_next_life_decides_only_on_unfinished_orders(peers: PeerTable) -> None:
    segment = Segment.private(SegmentLayout(4, []))
    add_peer(peers, "worker 0")
    first = make_leader(peers=peers, segment=segment)
    first.begin(1, 0, Ledger())
    for event in (PullArrived(0), PushArrived(0, 1, 0, 1)):
        given = first.arrived(event)
    segment.words[ORDERS] = given[0][0]  # it was killed before the release

    carried_out: list[Numbered] = []
    second = make_leader(peers=peers, segment=segment, carry_out=carried_out.extend)
    second.recover(1)
    assert carried_out == [given[1]]
    assert (second.step, second.generation) == (1, 1)


async def test_nothing_is_decided_after_the_end(peers: PeerTable) -> None:
    add_peer(peers, "worker 0")
    leader = begun_leader(peers=peers)
    leader.end()
    assert leader.arrived(PullArrived(0)) == ()


async def test_state_that_the_journal_cannot_hold_is_not_gone_on_with(
    peers: PeerTable, constants: Constants
) -> None:
    segment = Segment.private(SegmentLayout(4, []))
    segment.words[GENERATION] = 1
    leader = make_leader(peers=peers, segment=segment)
    constants(journals, JOURNAL_NBYTES=64)
    assert not leader.begin(1, 0, Ledger())
    assert segment.words[GENERATION] == 0


@pytest.mark.parametrize(
    ("orders", "finished", "all_delivered"),
    [(2, True, True), (1, True, False), (2, False, False)],
    ids=["all is there", "orders are under way", "a push may be"],
)
async def test_all_is_delivered_when_orders_are_carried_out_and_stopped_workers_were_answered(
    orders: int, finished: bool, all_delivered: bool, peers: PeerTable
) -> None:
    shard = add_peer(peers, "ps 1")
    worker = add_peer(peers, "worker 0", finished=finished)
    leader = make_leader(policy="sync-replicas", shards=2, peers=peers)
    assert not leader.all_delivered, "the job has not begun"
    leader.begin(1, 10, Ledger())  # it is at its last step
    leader.arrived(PullArrived(0))
    leader.joined(add_peer(peers, "worker 1"))
    assert worker.orders == 0
    assert leader.delivery.sent == 1
    orders = orders - 1  # one order was given: to stop worker 0
    leader.on_shard_report(Asked(sender="ps 1", incarnation=1), replace(REPORT, orders=orders))
    assert shard.orders == orders
    assert leader.all_delivered is all_delivered


async def test_report_of_a_shard_is_of_its_current_life_and_generation(peers: PeerTable) -> None:
    shard = add_peer(peers, "ps 1")
    leader = make_leader(policy="sync-replicas", shards=2, peers=peers)
    leader.begin(2, 0, Ledger())
    leader.on_shard_report(Asked(sender="ps 1", incarnation=1, generation=1), REPORT)
    assert shard.report is None
    with pytest.raises(FencedError):
        leader.on_shard_report(Asked(sender="ps 1", incarnation=2, generation=2), REPORT)
    with pytest.raises(ProtocolError):  # of an order that was never given
        report = replace(REPORT, orders=1 << 63)
        leader.on_shard_report(Asked(sender="ps 1", incarnation=1, generation=2), report)


async def test_shard_that_cannot_update_ends_the_job(peers: PeerTable) -> None:
    add_peer(peers, "ps 1")
    leader = begun_leader(shards=2, peers=peers)
    report = replace(REPORT, failure="no learning rate")
    leader.on_shard_report(Asked(sender="ps 1", incarnation=1), report)
    assert leader.failure_code == ExitCode.USAGE
    assert "ps 1" in leader.failure and "no learning rate" in leader.failure


async def test_push_counts_once_it_lies_ready_on_all_shards(peers: PeerTable) -> None:
    for name in ("ps 1", "worker 0"):
        add_peer(peers, name)
    carried_out: list[Numbered] = []
    leader = make_leader(
        policy="hogwild:whole", shards=2, peers=peers, carry_out=carried_out.extend
    )
    leader.begin(1, 0, Ledger())
    leader.arrived(PullArrived(0))
    assert leader.arrived(PushArrived(0, 1, 0, 1)) == ()
    for _ in range(2):  # it is reported again until it is decided
        leader.on_arrived(Asked(sender="ps 1", incarnation=1), Arrived((0,), (1,), (1,), (True,)))
        assert kinds(carried_out) == [Apply, Answer]


async def test_update_that_clips_waits_for_the_squares_of_all_shards_also_after_a_kill() -> None:
    segment, given, squares = Segment.private(SegmentLayout(4, [])), list[Numbered](), [3, 2**300]

    def leader_of(peers: PeerTable) -> Leader:
        for name in ("ps 1", "worker 0"):
            add_peer(peers, name)
        options: dict[str, Any] = {"policy": "sync-replicas:aggregate=1", "clip_norm": 1.0}
        return make_leader(
            shards=2, peers=peers, segment=segment, carry_out=given.extend, **options
        )

    def report(square: int) -> ShardReport:
        return replace(REPORT, measured=1, square=f"{square:x}")

    leader = leader_of(PeerTable(5.0, 2, lambda peer: False))
    leader.begin(1, 0, Ledger())
    for worker in (0, 1):
        leader.joined(add_peer(leader.peers, f"worker {worker}"))
        given += leader.arrived(PullArrived(worker))
    ps, push = Asked(sender="ps 1", incarnation=1), Arrived((0,), (1,), (1,), (True,))
    given += leader.arrived(PushArrived(0, 1, 0, 1))
    leader.on_arrived(ps, push)
    assert kinds(given[-1:]) == [Measure] and not leader.all_delivered
    number = given[-1][0]
    leader.event(Save("run/step-1"))
    with pytest.raises(ProtocolError, match="ps 1 reports the square '-1'"):
        leader.on_shard_report(ps, replace(REPORT, measured=1, square="-1"))
    for _ in range(2):
        leader.on_shard_report(ps, report(squares[1]))
    assert given[-1][0] == number
    segment.words[ORDERS] = number - 1  # it was killed before its own part was known

    given.clear()
    leader = leader_of(PeerTable(5.0, 2, lambda peer: False))
    leader.recover(1)
    assert [each for each, _ in given][:1] == [number]
    leader.measured(Measured(0, 1, squares[0]))
    leader.measured(Measured(0, 1, squares[0]))
    assert kinds(given)[:4] == [Measure, Reduce, Answer, Snapshot]
    assert given[1] == (number + 1, Reduce((0,), float(sum(squares))))


async def test_report_whose_columns_differ_in_length_is_refused(peers: PeerTable) -> None:
    add_peer(peers, "ps 1")
    leader = begun_leader(policy="hogwild:whole", shards=2, peers=peers)
    with pytest.raises(ProtocolError, match="ps 1 reports pushes in columns"):
        leader.on_arrived(Asked(sender="ps 1", incarnation=1), Arrived((0, 1), (1,), (1,), (True,)))


async def test_waits_are_those_for_the_worker_whose_push_comes_last(stop_clock: StopClock) -> None:
    clock = stop_clock(leader_module)
    leader = begun_leader(workers=(0, 1), policy="sync-replicas")
    for step, (first, last) in enumerate([(0, 1), (0, 1), (1, 0)], 1):
        leader.arrived(PushArrived(first, step, 2 * step - 2 + first, 1))
        clock.tick()
        leader.arrived(PushArrived(last, step, 2 * step - 2 + last, 1))
    value = leader.metrics.registry.get_sample_value
    name = "zmqtrain_waited_for_seconds_total"
    assert [value(name, {"worker": worker}) for worker in ("0", "1")] == [1.0, 2.0]


async def test_wait_that_a_report_ends_is_for_the_last_worker_in_it(stop_clock: StopClock) -> None:
    clock = stop_clock(leader_module)
    leader = begun_leader(workers=(0, 1), policy="sync-replicas", shards=2)
    add_peer(leader.peers, "ps 1")
    for worker in (0, 1):
        leader.arrived(PushArrived(worker, 1, worker, 1))
    for workers in ((0,), (0, 1)):  # the first of them is reported once more
        clock.tick()
        ones = (1,) * len(workers)
        told = Arrived(workers, ones, ones, (True,) * len(workers))
        leader.on_arrived(Asked(sender="ps 1", incarnation=1), told)
    value = leader.metrics.registry.get_sample_value
    name = "zmqtrain_waited_for_seconds_total"
    assert not value(name, {"worker": "0"})
    assert value(name, {"worker": "1"}) == 2.0  # since its push came to the leader


async def test_steps_of_a_worker_never_count_down() -> None:
    leader = leader_with_a_roster()
    worker, _ = leader.peers.workers()
    losses = {0: 0.5, 1: 0.25}
    leader.stepped(Stepped(3, 60, 1.5, over=False, losses=losses))
    assert (leader.step, worker.pushes, worker.loss) == (3, 3, 0.5)
    leader.stepped(Stepped(4, 80, 2.0, over=True, losses=losses))
    assert (leader.step, worker.pushes) == (4, 4)
    leader.arrived(PushArrived(0, 1, 8, 10, True, 0.125))
    assert (worker.pushes, worker.loss) == (5, 0.125)


async def test_worker_that_joins_late_begins_where_the_slowest_is_and_lags_behind_nobody() -> None:
    leader = leader_with_a_roster()
    for worker, steps in ((0, 70), (1, 60)):
        leader.arrived(PushArrived(worker, steps, 8, 10, True, 0.125))
    late = add_peer(leader.peers, "worker 2")
    leader.joined(late)
    assert late.pushes == 60
    leader.arrived(PushArrived(2, 1, 8, 10, True, 0.125))
    assert late.pushes == 61
    value = leader.metrics.registry.get_sample_value
    assert value("zmqtrain_worker_step", {"worker": "2"}) == 61


async def test_late_worker_is_level_with_the_others_after_a_kill() -> None:
    segment = Segment.private(SegmentLayout(4, []))
    first = leader_with_a_roster(segment=segment)
    first.stepped(Stepped(3, 60, 1.5, over=True, losses={0: 0.5, 1: 0.25}))
    peers = PeerTable(5.0, 1, lambda peer: False)
    early, late = (
        add_peer(peers, f"worker {index}", pushes=pushes) for index, pushes in ((0, 9), (1, 0))
    )
    second = make_leader(policy="sync-replicas", peers=peers, segment=segment, has_board=True)
    second.recover(1)
    assert early.pushes == late.pushes == 12
    second.arrived(PushArrived(1, 1, 8, 10, True, 0.125))
    assert (early.pushes, late.pushes) == (12, 13)


async def test_steps_of_a_roster_are_figures_as_those_by_messages_are() -> None:
    leader = leader_with_a_roster()
    leader.stepped(Stepped(3, 60, 1.5, over=True, losses={0: 0.5, 1: 0.25}))
    value = leader.metrics.registry.get_sample_value
    assert value("zmqtrain_pushes_total", {"result": "applied"}) == 6
    assert value("zmqtrain_staleness_versions_count") == 6
    assert value("zmqtrain_parameter_version") == value("zmqtrain_global_step") == 3
    assert value("zmqtrain_worker_step", {"worker": "1"}) == 3


async def test_journal_keeps_the_end_of_a_roster_and_not_each_look_at_it() -> None:
    segment = Segment.private(SegmentLayout(4, []))
    leader = leader_with_a_roster(segment=segment)
    journal, losses = Journal(segment), {0: 0.5, 1: 0.25}
    before = len(journal.read())
    for steps in range(1, 9):
        leader.stepped(Stepped(steps, 20 * steps, 0.5 * steps, over=False, losses=losses))
    assert len(journal.read()) == before
    leader.stepped(Stepped(8, 160, 4.0, over=True, losses=losses))
    following = make_leader(peers=leader.peers, segment=segment)
    following.recover(1)
    assert following.step == 8
    assert following.coordinator.roster is None


@pytest.mark.parametrize(("policy", "steps"), [("sync-replicas", [5, 5]), ("hogwild", [5, 4])])
def test_workers_begin_a_pass_together_if_the_policy_bounds_their_distance(
    policy: str, steps: list[int], peers: PeerTable
) -> None:
    for name in ("worker 0", "worker 1"):
        add_peer(peers, name)
    leader = begun_leader(policy=policy, peers=peers)
    workers = list(peers.workers())
    workers[0].pushes, workers[1].pushes = 5, 4
    leader.event(Extend(7))
    assert [peer.pushes for peer in workers] == steps


async def test_events_before_the_first_generation_are_not_decided_on() -> None:
    leader = make_leader()
    leader.joined(add_peer(leader.peers, "worker 0"))
    assert not leader.coordinator.members
    leader.begin(1, 0, Ledger())
    assert leader.coordinator.members.keys() == {0}


async def test_figures_of_the_policy_are_those_of_its_workers_and_tokens() -> None:
    leader = begun_leader(workers=(0, 1), policy="sync-replicas:aggregate=1,tokens=3")
    value = leader.metrics.registry.get_sample_value
    for sequence in (1, 2):
        leader.arrived(PushArrived(0, sequence, leader.coordinator.ledger.leases[0][0], 10))
    WorkerWatch(leader).check()
    policy = leader.coordinator.policy
    assert isinstance(policy, TokenSyncReplicas)
    assert value("zmqtrain_tokens_queued") == len(policy.tokens) == 3 + 2 - 2
    assert value("zmqtrain_token_takers") == 0
    assert value("zmqtrain_tokens_taken_total") == 2
    for worker, behind in waiting.behind(leader.coordinator).items():
        assert value("zmqtrain_worker_behind_steps", {"worker": str(worker)}) == behind
    leader.left(next(peer for peer in leader.peers if peer.index == 1))
    leader.event(SwitchPolicy("hogwild"))
    leader.arrived(PushArrived(0, 3, leader.coordinator.ledger.leases[0][0], 10))
    WorkerWatch(leader).check()
    assert leader.policy == "hogwild"
    assert math.isnan(value("zmqtrain_tokens_queued") or 0)
    assert value("zmqtrain_tokens_taken_total") == 2
    assert value("zmqtrain_worker_behind_steps", {"worker": "0"}) == 0
    assert value("zmqtrain_worker_behind_steps", {"worker": "1"}) is None


async def test_workers_are_expected_that_were_asked_for_or_came_and_have_not_left() -> None:
    leader = make_leader()
    value = leader.metrics.registry.get_sample_value
    expected = []

    def note() -> None:
        WorkerWatch(leader).check()
        expected.append(value("zmqtrain_expected_workers"))

    note()
    peers = [add_peer(leader.peers, f"worker {index}") for index in range(4)]
    note()
    peers[3].gone = peers[3].left = True  # by "zmqtrain scale"
    note()
    peers[0].gone = True  # its lease ran out
    note()
    peers[1].gone = peers[1].left = True
    note()
    assert expected == [2, 4, 3, 3, 2]
