"""A ps that is killed and started again: with all that it held, or with nothing of it."""

from __future__ import annotations

import signal
import sys
from typing import Any

from tests.harness import Stage, check_counts
from zmqtrain.errors import ExitCode

STEPS = 200
PS = 2


def counting_job(stage: Stage, **fields: Any) -> str:
    """Write a job whose parameters count how often each example was learned from."""
    common = {"policy": "sync-replicas:aggregate=1", "steps": STEPS, "logdir": str(stage.logdir)}
    return stage.job("counting_job", gated=True, **common, **fields)


def test_killed_ps_goes_on_where_it_was(stage: Stage) -> None:
    cluster = stage.cluster(counting_job(stage, save_secs=1000, rows=True), ps=PS, workers=2)
    patient = ("--lease-s", "60")  # no worker dies, and a busy machine is slow
    servers = [cluster.start("ps", index, *patient) for index in range(PS)]
    chief = cluster.start("chief", 0, *patient)
    workers = [cluster.start("worker", index, *patient) for index in range(2)]
    step = 0
    for index in range(PS):
        least = step + 4
        step = cluster.until_status(lambda status, n=least: status.step >= n, "steps").step
        servers[index].signal(signal.SIGKILL)
        servers[index].exit_code()
        # Workers that have mapped its memory wait, so that it is no rubbish.
        clean = stage.start("clean", sys.executable, "-m", "zmqtrain", "clean", "--json")
        assert clean.summary()["removed"] == 0
        servers[index] = cluster.start("ps", index, *patient)
        servers[index].until_line("this ps was killed at version .* of generation 1")
    stage.open_gate()

    assert [task.exit_code() for task in [chief, *workers, *servers]] == [0] * (3 + PS), (
        stage.report
    )
    assert f"global step {STEPS}," in chief.output
    assert [worker.lines("join(ing|ed) again") for worker in workers] == [[], []], stage.report
    assert len(check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}")) == STEPS


def test_under_an_engine_a_task_that_is_told_to_leave_takes_nothing_along(stage: Stage) -> None:
    """Nothing is ever saved but for a ps that leaves, and at the end, which a person asks for."""
    cluster = stage.cluster(counting_job(stage, save_secs=0), ps=PS, workers=2)
    leave = ("--on-term", "leave")
    servers = [cluster.start("ps", index, *leave) for index in range(PS)]
    chief = cluster.start("chief", 0, *leave)
    workers = [cluster.start("worker", index) for index in range(2)]
    cluster.until_status(lambda status: status.step >= 4, "steps")
    chief.signal(signal.SIGTERM)
    assert chief.exit_code() == ExitCode.TERMINATED, str(chief)
    chief = cluster.start("chief", 0, *leave)
    chief.until_line("taking over in generation 1")

    generation = 1
    for index in range(PS):
        servers[index].signal(signal.SIGTERM)
        assert servers[index].exit_code() == ExitCode.TERMINATED, str(servers[index])
        assert servers[index].lines("leaving after .*/step-"), str(servers[index])
        (left,) = stage.segments.glob(f"ps-{index}-*")
        left.unlink()
        generation += 1
        servers[index] = cluster.start("ps", index, *leave)
        servers[index].until_line(f"generation {generation} begins at version .*, from .*/step-")

    step = cluster.until_status(lambda status: status.step, "the last generation").step
    stop = stage.start("stop", sys.executable, "-m", "zmqtrain", "stop", "--ps", cluster.leader)
    ended = [task.exit_code() for task in [stop, chief, *workers, *servers]]
    assert ended == [0] * (4 + PS), stage.report
    last = max((stage.logdir / "checkpoints").glob("step-*"))
    assert len(check_counts(last)) >= step
