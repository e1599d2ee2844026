"""Jobs without parameter servers: each worker process hosts a shard."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.harness import Process, Stage, check_counts
from zmqtrain.protocol.status import Status
from zmqtrain.transport.curve import make_keys

STEPS = 200


def processes(status: Status) -> dict[str, str]:
    """Return host:pid of each task."""
    return {task.task: task.process for task in status.tasks}


def kill(process: str) -> None:
    os.kill(int(process.rpartition(":")[2]), signal.SIGKILL)


@pytest.mark.parametrize(("exchange", "hosts"), [("direct", 2), ("board", 1)])
def test_killed_worker_takes_its_shard_along_and_both_go_on_where_they_were(
    stage: Stage, exchange: str, hosts: int
) -> None:
    job = stage.job(
        "counting_job", gated=True, policy="sync-replicas:aggregate=2", aggregate=2, steps=STEPS,
        logdir=str(stage.logdir),
    )  # fmt: skip
    run = stage.train(job, "--ps", 0, "--workers", 2, "--exchange", exchange)
    address = stage.run_address()
    for number in (1, 0):  # worker 0 hosts the leader
        before = stage.until_status(address, lambda s: s.step > 2, "the first steps")
        tasks = processes(before)
        assert [task.step for task in before.tasks if task.task == "ps 0"] > [0]
        for host in range(hosts):
            assert tasks[f"ps {host}"] == tasks[f"worker {host}"] != tasks["chief 0"]
        kill(tasks[f"worker {number}"])
        stage.until_status(
            address,
            lambda s, old=tasks, n=number, step=before.step: (  # type: ignore[misc]
                processes(s)[f"worker {n}"] != old[f"worker {n}"] and s.step > step + 4
            ),
            "steps of the next life",
        )
    stage.open_gate()
    summary = run.summary()
    assert (summary["strategy"], summary["exchange"], summary["ps"], summary["workers"]) == (
        "multi-worker-mirrored", exchange, 0, 2,
    )  # fmt: skip
    assert (summary["rosters"] > 0) == (exchange == "board")
    assert summary["global_step"] == STEPS
    assert len(check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}")) == 2 * STEPS
    line = f"worker {hosts - 1}: this ps was killed at version .* of generation 1"
    assert run.lines(line), str(run)


def test_first_worker_that_is_lost_for_good_is_done_without_and_may_come_back(stage: Stage) -> None:
    """The chief of the others has a worker's key."""
    job = stage.job(
        "counting_job", gated=True, policy="hogwild:whole", steps=STEPS, logdir=str(stage.logdir),
        save_secs=0.3,
    )  # fmt: skip
    keys = stage.directory / "keys"
    make_keys(keys, {"worker": 3, "chief": 1})
    addresses = ",".join(f"127.0.0.1:{port}" for port in stage.free_ports(3))

    def start(index: int) -> Process:
        return stage.role(
            "worker",
            *("--job", job, "--ps", "0", "--workers", addresses, "--index", str(index)),
            *("--exchange", "direct", "--keys", str(keys), "--metrics-port", "0"),
            *("--heartbeat-s", "0.5", "--lease-s", "2", "--peer-timeout-s", "6", "--threads", "1"),
        )

    tasks = [start(index) for index in range(3)]
    for task in ("ps 1", "ps 2", "worker 1", "worker 2"):
        tasks[0].until_line(f"{task} joined")
    tasks[0].until_line("saved .*/step-")
    tasks[0].signal(signal.SIGKILL)
    tasks[0].exit_code()
    first = tasks[1]
    first.until_line("generation 2 begins at version .*, from .*/step-")
    tasks[0] = start(0)
    tasks[0].until_line("group 2 of workers carries the job: .*")
    first.until_line("worker 0 joined")
    stage.open_gate()
    assert [task.exit_code() for task in tasks] == [0, 0, 0], stage.report
    assert "2 workers without ps" in first.output
    assert len(check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}")) == STEPS
    assert [*stage.logdir.glob("checkpoints/GROUP*")] == []


def test_tf_config_without_ps_makes_a_cluster_whose_chief_computes_and_keys_hold(
    stage: Stage,
) -> None:
    keys = stage.directory / "keys"
    make_keys(keys, {"worker": 3, "chief": 1, "client": 1})
    chief, *workers = (f"127.0.0.1:{port}" for port in stage.free_ports(3))
    cluster = {"chief": [chief], "worker": workers}
    job = stage.job(gated=True, steps=300)
    started = []
    for role, index in (("chief", 0), ("worker", 0), ("worker", 1)):
        config = {"cluster": cluster, "task": {"type": role, "index": index}}
        started.append(
            stage.role(
                role,
                *("--job", job, "--keys", str(keys), "--metrics-port", "0", "--threads", "1"),
                env={"TF_CONFIG": json.dumps(config)},
            )
        )
    asking = {"ZMQTRAIN_KEYS": str(keys), "TF_CONFIG": json.dumps({"cluster": cluster})}

    def told() -> bool:
        command = (sys.executable, "-m", "zmqtrain", "status", "--json")
        status = stage.start("status", *command, env=asking)
        return status.exit_code() == 0 and status.json()["step"] > 0

    stage.until(told, "the first step")
    stage.open_gate()
    assert [task.exit_code() for task in started] == [0, 0, 0], stage.report
    assert "policy sync-replicas, 3 workers without ps\nglobal step 300," in started[0].output
