"""Clusters in virtual time: no drawn schedule of faults breaks an invariant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from simulation.drawing import draw
from simulation.fakes import metrics_of
from simulation.faults import Fault
from simulation.run import run_seed, simulate, smallest
from tests.modules import Modules
from tests.traces import ON_A_BOARD, calm, held, trace_of
from zmqtrain.policies.bounded_staleness import BoundedStaleness

KINDS: tuple[dict[str, bool], ...] = ({}, {"hosted": True}, {"board": True}, {"hosts": True})
ANOTHER_CHIEF_ENDS_IT = (193, 208)
CHIEF_HURRIES = 771000793
CHIEF_IS_STOPPED_BEFORE_IT_HAS_JOINED_EVERYWHERE = 770000007
PS_HAS_LOST_EVERYTHING_BEFORE_THE_END = 53585
PS_REPAIRS_AN_UPDATE_AT_THE_END_OF_AN_EPOCH = (54, 57)
PUSH_COMES_BEHIND_A_SWITCH_THAT_RELEASED_IT = 990096
WORKERS_HOLD_THE_END_BACK_UNTIL_THE_CHIEF_HAS_ENDED_THE_RUN = 202401
CHIEF_IS_BELIEVED_WHERE_ITS_LAST_LIFE_IS_KNOWN = 73000539
WORKER_LEARNS_AFTER_A_CUT_THAT_ITS_BUFFER_HAS_GONE_TO_ANOTHER = 402822


@pytest.mark.parametrize(
    ("seeds", "kind", "fields"),
    [
        (range(12), {}, {}),
        ([PS_HAS_LOST_EVERYTHING_BEFORE_THE_END], {}, {}),
        ([WORKERS_HOLD_THE_END_BACK_UNTIL_THE_CHIEF_HAS_ENDED_THE_RUN], {}, {}),
        ([WORKER_LEARNS_AFTER_A_CUT_THAT_ITS_BUFFER_HAS_GONE_TO_ANOTHER], {}, {}),
        (range(3), {"hosted": True}, {}),
        ([CHIEF_IS_STOPPED_BEFORE_IT_HAS_JOINED_EVERYWHERE, CHIEF_HURRIES], {"hosted": True}, {}),
        ([PUSH_COMES_BEHIND_A_SWITCH_THAT_RELEASED_IT], {"hosted": True}, {}),
        ([CHIEF_IS_BELIEVED_WHERE_ITS_LAST_LIFE_IS_KNOWN], {"hosted": True}, {}),
        (range(4), {"board": True}, {}),
        ([*range(4), *ANOTHER_CHIEF_ENDS_IT], {}, {"epochs": 3}),
        (
            [*range(3), *PS_REPAIRS_AN_UPDATE_AT_THE_END_OF_AN_EPOCH],
            {},
            {"epochs": 3, "keeps": True, "sets_weights": True},
        ),
        (range(3), {}, {"policy": "local-steps:3"}),
        (range(3), {"hosted": True}, {"policy": "local-steps:2", "evaluates": 3}),
        (range(2), {}, {"policy": "local-steps:2", "epochs": 3}),
        (range(0, 4, 3), {}, {"evaluates": 1}),
        ([1], {}, {"evaluates": 2}),
        ([2], {}, {"evaluates": 5}),
        (range(2), {"hosted": True}, {"evaluates": 1}),
        (range(2), {"board": True}, {"evaluates": 2}),
        *((range(2), {"epochs": True} | kind, {}) for kind in KINDS),
        *((range(2), {"tables": True} | kind, {}) for kind in KINDS[:3]),
        (range(2), {"tables": True, "epochs": True, "clips": True}, {}),
    ],
)
def test_drawn_schedule_breaks_no_invariant(
    seeds: Iterable[int], kind: dict[str, bool], fields: dict[str, Any]
) -> None:
    reports = [simulate(replace(draw(seed, **kind), **fields)) for seed in seeds]
    assert not [str(report) for report in reports if report.broken]


@pytest.mark.parametrize("seed", [3, 17])
def test_lost_host_costs_no_step_of_tables_that_have_copies(seed: int) -> None:
    trace: list[str] = []
    report = simulate(draw(seed, hosts=True, tables=True), trace.append)
    assert not report.broken, str(report)
    assert any("without a step lost" in line for line in trace)


def test_drawn_schedule_with_lost_hosts_breaks_no_invariant() -> None:
    traces: list[list[str]] = [[] for _ in range(4)]
    reports = [simulate(draw(seed, hosts=True), traces[seed].append) for seed in range(4)]
    assert not [str(report) for report in reports if report.broken]
    regrouped = [any("group 2 of workers carries" in line for line in trace) for trace in traces]
    assert any(regrouped)
    chief_is_restarted_in_a_group_that_is_over = 44000989
    assert not run_seed(chief_is_restarted_in_a_group_that_is_over, hosts=True).broken


def test_workers_on_a_board_push_only_where_the_ps_has_its_say() -> None:
    trace: list[str] = []
    schedule = calm(**ON_A_BOARD, steps=24)
    report = simulate(schedule, trace.append)
    assert not report.broken, report
    pushes = [line for line in trace if "-> sent" in line and "Push(" in line]
    assert len(pushes) < schedule.steps


def waited_s(member: int, other: int) -> float:
    """Return for how long a member has waited for another one, over all runs."""
    (metric,) = metrics_of("worker", member).waited_for_seconds[other].collect()
    return sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))


def test_waits_are_charged_to_the_slow_member() -> None:
    before = waited_s(0, 1), waited_s(1, 0)
    phases = metrics_of("worker", 1).phase_duration_seconds
    updated_s = phases.update.total
    held(calm(**ON_A_BOARD | {"workers": 2}, steps=24, slow=0))
    assert phases.update.total > updated_s
    for_fast, for_slow = waited_s(0, 1) - before[0], waited_s(1, 0) - before[1]
    assert for_slow > for_fast >= 0


def test_member_that_slept_through_the_end_of_its_roster_updates_nothing() -> None:
    """Worker 1 waits for a gradient when it is stopped, and wakes in the next roster."""
    timing = calm().timing.model_copy(update={"heartbeat_s": 0.05, "lease_s": 0.2})
    for stop_s, save_s in ((0.2, 0.23), (1.2, 1.27)):
        faults = Fault(stop_s, "stop", ("worker 1",), 1.7), Fault(save_s, "save")
        board = {**ON_A_BOARD, "workers": 2, "timing": timing}
        trace = trace_of(calm(**board, steps=20, slow=0, keeps=True, save_secs=100, faults=faults))
        assert trace.of("worker 1 was left out of the step that it has computed")


def test_seed_is_replayed_exactly() -> None:
    """Also after others, and whether or not anybody is told of it."""
    traces: list[list[str]] = [[], []]
    told = [simulate(draw(seed), traces[0].append) for seed in (3, 30)]
    again = [simulate(draw(seed), traces[1].append) for seed in (3, 30)]
    assert traces[0] == traces[1]
    assert len(traces[0]) > 500
    assert told == again
    assert told[0] == simulate(draw(3))


@pytest.mark.parametrize("kill_at_s", [0.5, 0.51])
def test_stopped_and_killed_ps_is_away_no_longer_than_a_killed_one(kill_at_s: float) -> None:
    stop = Fault(0.505, "stop", ("ps 0",), 4.0)
    kill = Fault(kill_at_s, "kill", ("ps 0",), 3.0, lines=300)
    trace: list[str] = []
    report = simulate(calm(lane="shm", faults=(stop, kill)), trace.append)
    assert not report.broken, report
    killed = [line for line in trace if line.endswith("ps 0 is killed")]
    assert [float(line.split()[0]) < stop.ends_at for line in killed] == [True]


class OwnPolicy(BoundedStaleness):
    """A plug-in: the class that ``module:Class`` names."""

    def __init__(self) -> None:
        super().__init__(1)


def test_policy_of_ones_own_goes_through_the_same_schedules(modules: Modules) -> None:
    module = ModuleType("policy_of_ones_own")
    module.OwnPolicy = OwnPolicy  # type: ignore[attr-defined]
    modules(module.__name__, module)
    own, drawn = draw(7, "policy_of_ones_own:OwnPolicy"), draw(7)
    assert own.policy != drawn.policy
    assert (own.faults, own.workers) == (drawn.faults, drawn.workers)
    assert not simulate(own).broken


@pytest.mark.parametrize(
    ("policy", "ps", "lane"),
    [
        ("hogwild", 3, "tcp"),
        ("sync-replicas:aggregate=2,tokens=3", 3, "tcp"),
        ("local-steps:2,after=3", 1, "shm"),
    ],
)
def test_policy_that_no_schedule_above_has_gets_through_calm_weather(
    policy: str, ps: int, lane: str
) -> None:
    held(calm(policy=policy, ps=ps, lane=lane))


def test_faults_that_do_not_matter_are_left_out() -> None:
    faults = (Fault(0.1, "break", ("ps 0",)), Fault(0.2, "save"))
    schedule = calm(ps=1, workers=2, faults=faults, absent=frozenset({"worker 1"}))
    assert "waited 20 s for worker 1" in simulate(schedule).broken
    assert smallest(schedule).faults == ()
