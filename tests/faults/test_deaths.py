"""Deaths that come together, again, or at the worst moment; and workers that return as others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest

from simulation.faults import Fault
from simulation.loop import current_process
from simulation.model import CountingModel
from simulation.rules import delay, duplicate
from simulation.schedule import WIDE
from tests.traces import ON_A_BOARD, calm, held, trace_of
from zmqtrain.errors import ExitCode
from zmqtrain.models.base import Batch, Gradients
from zmqtrain.wire.control import Close
from zmqtrain.wire.messages import Parameters

POLICIES = ("hogwild", "bounded-staleness:1", "sync-replicas")
DIRECT: dict[str, Any] = {"ps": 0, "workers": 3, "lane": "tcp", "in_chunks": True}
AT_S = 0.5


def kill(name: str, at_s: float = AT_S, lasts_s: float = 0.3, lines: int = 0) -> Fault:
    return Fault(at_s, "kill", (name,), lasts_s, lines=lines)


HOSTED: dict[str, Any] = {"ps": 0, "workers": 2, "lane": "shm"}


@pytest.mark.parametrize(
    ("names", "fields", "lines", "policies"),
    [
        (["worker 1"], {"lane": "tcp", "in_chunks": True}, range(1, 500, 83), POLICIES),
        (["worker 1"], {"lane": "shm"}, range(1, 500, 83), POLICIES),
        (["worker 0"], ON_A_BOARD, range(1, 700, 175), ["sync-replicas"]),
        (["worker 1"], ON_A_BOARD, range(1, 700, 175), ["sync-replicas"]),
        (["worker 0", "worker 1"], HOSTED, range(1, 900, 225), ["hogwild:whole"]),
        (["worker 0", "worker 1"], HOSTED, range(1, 900, 225), ["sync-replicas"]),
        (["ps 0", "ps 1"], {"lane": "tcp"}, range(1, 500, 125), ["sync-replicas"]),
        (["ps 0", "ps 1"], {"lane": "shm"}, range(1, 500, 125), ["sync-replicas"]),
    ],
)
def test_task_killed_anywhere_in_its_code_costs_no_push(
    names: list[str], fields: dict[str, Any], lines: range, policies: Iterable[str]
) -> None:
    """Every kill lands at another place, also between two chunks of a push on lane tcp."""
    for after, name, policy in zip(lines, cycle(names), cycle(policies), strict=False):
        report = held(calm(**fields, policy=policy, faults=(kill(name, lines=after),)))
        assert report.killed == (name,)


@pytest.mark.parametrize(
    ("fields", "lines"), [(ON_A_BOARD, 250), (DIRECT, 100)], ids=["board", "direct"]
)
def test_one_death_restarts_no_other_task_and_repeats_no_batch(
    fields: dict[str, Any], lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[str, int]] = []
    compute = CountingModel.loss_and_gradients

    def noted(model: CountingModel, parameters: Any, batch: Batch, out: Gradients) -> float:
        process = current_process()
        assert process is not None
        computed.append((process.name, int(batch[0][0])))
        return compute(model, parameters, batch, out)

    monkeypatch.setattr(CountingModel, "loss_and_gradients", noted)
    trace = trace_of(calm(**fields, steps=20, faults=(kill("worker 1", lines=lines),)))
    lives = {
        worker: {line.split("incarnation ")[1] for line in trace.of(f"{worker} joined")}
        for worker in ("worker 0", "worker 1", "worker 2")
    }
    assert {worker: len(found) for worker, found in lives.items()} == {
        "worker 0": 1, "worker 1": 2, "worker 2": 1,
    }  # fmt: skip
    survivors = [each for each in computed if each[0] != "worker 1"]
    assert len(survivors) >= 2 * 20 and len(set(survivors)) == len(survivors)


@pytest.mark.parametrize("lasts_s", [0.3, 20.0], ids=["shortly", "longer than others wait"])
def test_host_that_is_lost_takes_a_job_without_ps_back_to_its_checkpoint(lasts_s: float) -> None:
    """Its part of the parameters is gone."""
    faults = (Fault(1.5, "save"), kill("worker 1", 4.0, lasts_s))
    fields = {"workers": 3, "lane": "memory", "keeps": True, "save_secs": 1000.0}
    trace = trace_of(calm(ps=0, faults=faults, **fields))
    assert trace.of("generation 2 begins at version [1-9]")
    assert bool(trace.of("ended: PeerLostError")) == (lasts_s > 1)


TOGETHER = {
    "two workers": (kill("worker 0"), kill("worker 1")),
    "all workers": (kill("worker 0"), kill("worker 1"), kill("worker 2")),
    "all workers for a long time": (
        kill("worker 0", 0.4, 4.0),
        kill("worker 1", 0.5, 4.0),
        kill("worker 2", 0.6, 4.0),
    ),
    "one worker twice in a row": (kill("worker 1", lasts_s=0.1), kill("worker 1", 0.65, lines=40)),
    "the leader and a worker": (kill("ps 0", lines=50), kill("worker 1")),
    "another shard and a worker": (kill("ps 1"), kill("worker 1", lines=50)),
    "all shards": (kill("ps 0"), kill("ps 1", lines=50)),
    "everyone": tuple(map(kill, ("ps 0", "ps 1", "chief 0", "worker 0", "worker 1", "worker 2"))),
}


@pytest.mark.parametrize(
    ("kills", "policy"), list(zip(TOGETHER.values(), cycle(POLICIES))), ids=TOGETHER
)
def test_deaths_that_come_together_cost_no_push(kills: tuple[Fault, ...], policy: str) -> None:
    report = held(calm(policy=policy, faults=kills))
    assert sorted(report.killed) == sorted(fault.names[0] for fault in kills)


@pytest.mark.parametrize("policy", ["hogwild", "sync-replicas:aggregate=2"])
def test_worker_that_comes_back_under_another_number_takes_up_what_was_left(policy: str) -> None:
    kills = (Fault(0.2, "kill", ("worker 1",), 0.1, returns_as="worker 3"),)
    absent = frozenset({"worker 3"})
    trace = trace_of(calm(workers=4, policy=policy, steps=16, faults=kills, absent=absent))
    assert trace.of("ps 0 says: worker 1 has been silent for .*: it has left")
    assert trace.of("worker 3 says: leaving after [1-9]")


@pytest.mark.parametrize("name", ["ps 0", "ps 1", "chief 0"])
def test_task_killed_while_a_checkpoint_is_written_does_not_keep_the_job_from_being_saved(
    name: str,
) -> None:
    timing = calm().timing.model_copy(update={"lease_s": 0.4})
    for number, lines in enumerate(range(1, 1000, 200)):
        faults = (Fault(0.3, "save"), kill(name, 0.3, lines=lines))
        policy = POLICIES[number % len(POLICIES)]
        saves = {"lane": "shm", "keeps": True, "save_secs": 1000.0, "timing": timing}
        assert held(calm(policy=policy, faults=faults, **saves)).killed == (name,)


def test_job_waits_complete_for_a_chief_that_returns_after_the_last_step() -> None:
    trace = trace_of(calm(faults=(kill("chief 0", lasts_s=10.0),)))
    assert trace.of("ps 0 says: chief 0 is silent; training goes on without it")
    assert trace.of("chief 0 says: taking over in generation 1")
    assert len(trace.of("worker . joined")) == 3 * 2  # at every ps, once


def test_chief_stopped_while_it_takes_over_saves_what_was_learned_or_leaves_it() -> None:
    saved = []
    for ms in range(1450, 1850, 50):
        faults = (kill("chief 0", 0.8), Fault(ms / 1000, "interrupt"))
        trace = trace_of(calm(weather=WIDE, keeps=True, save_secs=1000.0, faults=faults))
        assert len(trace.of("ps 0 says: generation 1 begins")) == 1
        assert trace.of("chief 0 ended: exit code 130")
        saved += trace.of("chief 0 says: saved .*/step-0000000[1-9] ")
    assert len(saved) > 1


def test_chief_stopped_before_its_first_order_is_answered_saves_what_was_learned() -> None:
    """A ps may begin on that order, and workers train, while its answer is still on the way."""
    late = delay(Parameters, 1, sender="ps", receiver="chief 0", by_s=1.0)
    trace = trace_of(calm(keeps=True, faults=(Fault(0.5, "interrupt"),), rules=(late,)))
    assert len(trace.of("chief 0 starts")) == 1
    assert trace.of("chief 0 says: saved .*/step-0000000[1-9] ")


def test_interrupted_step_ends_without_a_dead_worker_before_its_lease() -> None:
    """What others were told to be part of it is part of the checkpoint."""
    timing = calm().timing.model_copy(update={"lease_s": 10.0})
    faults = (kill("worker 0", 0.5, 30.0), Fault(0.9, "interrupt"))
    policy = "sync-replicas:aggregate=8"
    hurried = duplicate(Close, where=lambda close: close.at_once)
    held(calm(policy=policy, keeps=True, timing=timing, faults=faults, rules=(hurried,)))


def test_leaving_ps_admits_no_task_that_joins_its_next_life() -> None:
    """They come while it waits for the goodbyes of the run that Ctrl-C has ended as it began."""
    for ms in range(45, 110, 13):
        held(calm(weather=WIDE, faults=(Fault(ms / 1000, "interrupt"),)))


@pytest.mark.parametrize(
    ("name", "policy"), [("ps 0", "bounded-staleness:1"), ("ps 1", "sync-replicas")]
)
def test_ps_that_is_told_to_end_alone_leaves_its_memory_to_its_next_life(
    policy: str, name: str
) -> None:
    usual = calm(policy=policy, lane="shm", faults=(Fault(0.5, "terminate", (name,)),))
    timing = usual.timing.model_copy(update={"grace_s": 0.3})
    trace = trace_of(calm(policy=policy, lane="shm", faults=usual.faults, timing=timing))
    assert trace.of(f"{name} ended: exit code {ExitCode.TERMINATED:d}")
    assert trace.of(
        f"{name} says: this ps was killed at version .* of generation 1: everything is there"
    )


def test_ps_that_ends_while_others_look_for_its_memory_is_waited_for() -> None:
    """Nobody takes that for a lane that is not to be had."""
    timing = calm().timing.model_copy(update={"grace_s": 0.0003})
    for at_s in (0.001, 0.002, 0.003, 0.004, 0.005):
        held(calm(lane="shm", timing=timing, faults=(Fault(at_s, "terminate", ("ps 1",)),)))


@pytest.mark.parametrize("name", ["ps 0", "ps 1"])
def test_ps_killed_between_a_drop_and_its_answer_gives_a_reason(name: str) -> None:
    faults = (Fault(0.3, "kill", (name,), 0.3),)
    held(calm(policy="sync-replicas:aggregate=3,tokens=3", steps=16, lane="shm", faults=faults))


def test_ps_killed_shortly_before_the_last_checkpoint_does_not_keep_it_from_being_written() -> None:
    """The leader lets its new life in when the lease of the old one is over: meanwhile."""
    for lines in range(700, 1000, 75):
        faults = (Fault(0.5, "save"), Fault(0.5, "kill", ("ps 1",), 0.3, lines=lines))
        held(calm(policy="hogwild", lane="shm", keeps=True, save_secs=1000.0, faults=faults))


def test_job_that_goes_back_to_one_checkpoint_twice_begins_two_epochs() -> None:
    faults = (Fault(0.3, "save"), kill("ps 0", 1.0), kill("ps 0", 2.5))
    trace = trace_of(calm(ps=1, lane="memory", keeps=True, save_secs=1000.0, faults=faults))
    begun = [line.partition("from")[2] for line in trace.of("ps 0 says: generation [23] begins")]
    assert len(begun) == 2
    assert begun[0] == begun[1]


@pytest.mark.parametrize("name", ["ps 0", "ps 1"])
def test_job_that_goes_back_from_another_policy_has_one_on_all_shards(name: str) -> None:
    """The ps that was not killed knows of the change, and the other does not."""
    faults = (Fault(0.2, "switch", spec="hogwild"), kill(name, 0.8))
    held(calm(lane="memory", keeps=True, save_secs=0.5, faults=faults))


def test_workers_that_were_done_take_part_again_when_the_job_goes_back() -> None:
    """The memory of ps 1 is gone before the chief has saved the last step."""
    faults = (kill("chief 0", 1.8, 6.0), kill("ps 1", 6.8))
    trace = trace_of(calm(lane="memory", keeps=True, save_secs=0.5, faults=faults))
    assert trace.of("ps 0 says: generation 2 begins at version [1-9],")
