"""Jobs without ps over three hosts, one of which is cut off for good."""

from __future__ import annotations

import sys

import pytest

from tests.harness import Process, Stage, check_counts
from tests.hosts.conftest import Hosts
from zmqtrain.errors import ExitCode

pytestmark = pytest.mark.hosts

STEPS = 300


def start(stage: Stage, hosts: Hosts, job: str, index: int) -> Process:
    """Start a worker on its host."""
    addresses = ",".join(f"{hosts.address(host)}:2222" for host in range(3))
    command = hosts.command(
        index,
        *(sys.executable, "-m", "zmqtrain.roles.worker", "--job", job, "--insecure", "--ps", "0"),
        *("--workers", addresses, "--index", str(index), "--lane", "tcp", "--metrics-port", "0"),
        *("--segment-dir", str(stage.directory / f"segments-{index}"), "--threads", "1"),
        *("--heartbeat-s", "0.5", "--lease-s", "2", "--peer-timeout-s", "10"),
        *("--join-timeout-s", "20"),
    )
    return stage.start(f"worker {index}", *command)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    ("lost", "is_small"), [(2, False), (0, False), (0, True)], ids=["2", "0", "0 with all parts"]
)
def test_two_of_three_hosts_go_on_and_the_one_that_is_cut_off_ends(
    stage: Stage, hosts: Hosts, lost: int, is_small: bool, copies: int
) -> None:
    """With all parts on host 0, it could go on as well as the others, and must not.

    With copies no step is lost.
    """
    job = stage.job(
        "counting_job", gated=True, policy="hogwild:whole", steps=STEPS, logdir=str(stage.logdir),
        save_secs=0.3, partition_nbytes=1 << 30 if is_small else 64, copies=copies,
    )  # fmt: skip
    tasks = [start(stage, hosts, job, index) for index in range(3)]
    parts = ("ps 1", "ps 2")[: copies - 1 if is_small else 2]
    for task in (*parts, "worker 1", "worker 2"):
        tasks[0].until_line(f"{task} joined")
    tasks[0].until_line("saved .*/step-")
    hosts.cut(lost)
    left = [task for index, task in enumerate(tasks) if index != lost]
    left[0].until_line("generation 2 begins at version .*, from .*/step-")
    assert tasks[lost].exit_code() == ExitCode.PEER_LOST, stage.report
    assert tasks[lost].lines("heard of no other worker, .*; it takes 2 of the 3"), stage.report
    needless = is_small and copies == 1
    assert bool(tasks[lost].lines("silent, and enough to go on without ps 0")) == needless
    assert bool(left[0].lines("goes on at step .*, without a step lost")) == (copies > 1)
    stage.open_gate()
    assert [task.exit_code() for task in left] == [0, 0], stage.report
    assert len(check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}")) == STEPS
