"""Links between hosts that are cut, in one direction or both, or slow; and a ps that is killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import Stage, check_counts
from tests.hosts.conftest import Hosts, SpreadJob

pytestmark = pytest.mark.hosts

STEPS = 600
WORKER_1 = 2  # its host
EXPIRY = "has been silent for .*: it has left"
NEW_LIFE = "joining again"


def counting_job(stage: Stage, policy: str, gradients: int = 1) -> str:
    """Write a job whose parameters count examples; so many gradients make an update."""
    fields: dict[str, Any] = {"policy": policy, "aggregate": gradients, "steps": STEPS}
    return stage.job("counting_job", gated=True, logdir=str(stage.logdir), **fields)


def counted(stage: Stage) -> int:
    """Return how many batches were learned from, each of them once."""
    return len(check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}"))


@pytest.mark.parametrize(
    ("still", "policy", "gradients"),
    [({}, "sync-replicas:aggregate=2", 2), ({"is_heard": True}, "hogwild", 1)],
    ids=["both ways", "from the ps only"],
)
def test_worker_cut_off_for_longer_than_its_lease_is_done_without_and_begins_a_new_life(
    stage: Stage,
    hosts: Hosts,
    spread: Callable[..., SpreadJob],
    still: dict[str, bool],
    policy: str,
    gradients: int,
) -> None:
    job = spread(counting_job(stage, policy, gradients))
    job.start_all()
    before = job.until_steps()[1]

    hosts.cut(WORKER_1, **still)
    job.until_worker(1, lambda w: w.state == "left", "its lease to expire")
    step = job.until(bool, "a status").step
    job.until(lambda s: s.step > step + 2, "progress without worker 1")
    hosts.heal(WORKER_1)
    after = job.until_steps()[1]

    assert after.process == before.process
    assert after.incarnation > before.incarnation
    assert job.tasks["worker 1"].lines(NEW_LIFE)
    job.end()
    assert counted(stage) == STEPS * gradients


def test_cut_shorter_than_the_lease_is_a_pause(
    stage: Stage, hosts: Hosts, spread: Callable[..., SpreadJob]
) -> None:
    job = spread(counting_job(stage, "bounded-staleness:2"), "--lease-s", "60")
    job.start_all()
    job.until_steps()

    hosts.cut(WORKER_1)
    cut = job.until_worker(1, lambda w: w.silent_s > 1, "its silence")
    hosts.heal(WORKER_1)
    after = job.until_worker(1, lambda w: w.step > cut.step + 2, "steps after its silence")

    assert after.incarnation == cut.incarnation
    job.end()
    assert job.ps.lines(EXPIRY) == []
    assert job.tasks["worker 1"].lines(NEW_LIFE) == []
    assert counted(stage) == STEPS


def test_slow_link_costs_a_worker_no_lease(
    stage: Stage, hosts: Hosts, spread: Callable[..., SpreadJob]
) -> None:
    job = spread(stage.job("level_job", policy="sync-replicas", steps=3), "--lease-s", "2")
    hosts.throttle(WORKER_1, 14)  # its 4.8 MB take longer than the lease, a chunk of them does not
    job.start_all()
    job.until_worker(1, lambda w: w.step > 0, "a whole gradient")
    hosts.heal(WORKER_1)
    job.end()

    worker = job.tasks["worker 1"]
    assert worker.lines("waiting for ps 0: it has not answered push 1"), "the link was not slow"
    assert worker.lines(NEW_LIFE) == []
    assert job.ps.lines(EXPIRY) == []
    assert "pushes 6 applied, 0 dropped, 0 duplicate" in job.tasks["chief 0"].output


def test_ps_killed_and_started_again_goes_on_with_workers_on_other_hosts(
    stage: Stage, spread: Callable[..., SpreadJob]
) -> None:
    job = spread(counting_job(stage, "hogwild"), "--lease-s", "10")
    job.start_all()
    before = job.until_steps()

    job.ps.signal(signal.SIGKILL)
    job.ps.exit_code()
    job.start("ps")
    job.ps.until_line("this ps was killed at version .* of generation 1")
    for index, task in enumerate(before):
        after = job.until_worker(index, lambda w, t=task: w.step > t.step + 2, "further steps")
        assert after.incarnation == task.incarnation

    job.end()
    assert counted(stage) == STEPS
