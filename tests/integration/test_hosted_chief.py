"""Clusters described by TF_CONFIG or flags, with a chief of their own and without."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.harness import Stage

Task = tuple[str, int]


def as_lists(jobs: dict[str, list[str]], task: Task) -> dict[str, Any]:
    return jobs


def with_dynamic_workers(jobs: dict[str, list[str]], task: Task) -> dict[str, Any]:
    """Show what a TFJob with dynamic workers shows: a worker itself and all ps, a ps itself."""
    role, index = task
    if role == "worker":
        return {"ps": jobs["ps"], "worker": {str(index): jobs["worker"][index]}}
    return {"ps": [jobs["ps"][index]], "worker": {}} if role == "ps" else {"worker": {}}


@pytest.mark.parametrize(
    ("chief", "cluster_as", "index_type"),
    [(None, as_lists, str), ("chief", with_dynamic_workers, int)],
)
def test_tf_config_alone_makes_a_cluster(
    stage: Stage, chief: str | None, cluster_as: Any, index_type: type
) -> None:
    is_partial = cluster_as is with_dynamic_workers
    ps = 2 if is_partial else 1
    addresses = [f"localhost:{port}" for port in stage.free_ports(ps + 3)]
    jobs = {"ps": addresses[:ps], "worker": addresses[ps : ps + 2]}
    if chief is not None:
        jobs[chief] = addresses[-1:]
    tasks: list[Task] = [(role, index) for role, job in jobs.items() for index in range(len(job))]
    flags = ["--ps", ",".join(jobs["ps"]), "--workers", "2", "--chief"] if is_partial else []
    job = stage.job(steps=60, policy="sync-replicas")
    started = {}
    for role, index in tasks:
        section = {"type": role, "index": index_type(index)}
        config = {"cluster": cluster_as(jobs, (role, index)), "task": section}
        started[role, index] = stage.role(
            "chief" if role == chief else role,
            *("--job", job, "--metrics-port", "0", "--threads", "1", *flags),
            env={"TF_CONFIG": json.dumps(config)},
        )
    codes = {task: process.exit_code() for task, process in started.items()}
    assert codes == dict.fromkeys(tasks, 0), stage.report
    teller = started[chief or "worker", 0]
    assert f"policy sync-replicas, {ps} ps, 2 workers\nglobal step 60," in teller.output
