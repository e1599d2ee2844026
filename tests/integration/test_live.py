"""Requests to a running job, and changes in it."""

from __future__ import annotations

import json
import urllib.request

from tests.harness import Stage


def fetch(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.status, response.read().decode()


def test_every_task_of_a_run_tells_its_health_and_its_metrics(stage: Stage) -> None:
    run = stage.train(stage.job(gated=True), "--ps", 2)
    status = stage.until_status(
        stage.run_address(),
        lambda s: (
            all(t.step > 0 for t in s.tasks if t.task != "chief 0")
            and [t.task for t in s.tasks if sum(t.phases_s) > 0] == ["worker 0", "worker 1"]
        ),
        "the first steps of everyone, and where their time went",
    )
    tasks = {task.task: task.metrics for task in status.tasks}
    assert tasks.keys() == {"ps 0", "ps 1", "chief 0", "worker 0", "worker 1"}
    expositions = {}
    for task, address in tasks.items():
        assert fetch(f"http://{address}/healthz")[0] == 200, task
        assert fetch(f"http://{address}/readyz")[0] == 200, task
        expositions[task] = fetch(f"http://{address}/metrics")[1]
    for knows in ("ps 0", "chief 0"):
        targets = json.loads(fetch(f"http://{tasks[knows]}/sd")[1])
        assert {tuple(each["targets"]) for each in targets} == {(at,) for at in tasks.values()}
        found = {
            f"{each['labels']['__meta_zmqtrain_role']} {each['labels']['__meta_zmqtrain_index']}"
            for each in targets
        }
        assert found == tasks.keys()
    stage.open_gate()
    run.summary()

    for task, text in expositions.items():
        role, index = task.split()
        assert f'zmqtrain_task_info{{index="{index}",role="{role}"}} 1.0' in text
        assert 'zmqtrain_role_state{state="training"} 1.0' in text, task
