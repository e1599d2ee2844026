"""Clusters that TF_CONFIG describes, of which each task sees a part."""

from __future__ import annotations

import json

from tests.harness import Stage


def test_tf_config_with_dynamic_workers_makes_a_cluster(stage: Stage) -> None:
    """A TFJob shows a worker itself and all ps, a ps itself, and nothing to the chief."""
    *ps, first, second = [f"localhost:{port}" for port in stage.free_ports(4)]
    seen = {
        ("ps", 0): {"ps": ps[:1], "worker": {}},
        ("ps", 1): {"ps": ps[1:], "worker": {}},
        ("worker", 0): {"ps": ps, "worker": {"0": first}},
        ("worker", 1): {"ps": ps, "worker": {"1": second}},
        ("chief", 0): {"worker": {}},
    }
    flags = (
        *("--job", stage.job(steps=60, policy="sync-replicas"), "--ps", ",".join(ps)),
        *("--workers", "2", "--chief", "--metrics-port", "0", "--threads", "1"),
    )
    tasks = [
        stage.role(role, *flags, env={"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
        for (role, index), cluster in seen.items()
        for task in [{"type": role, "index": index}]
    ]
    assert [task.exit_code() for task in tasks] == [0] * 5, stage.report
    assert "policy sync-replicas, 2 ps, 2 workers\nglobal step 60," in tasks[-1].output
