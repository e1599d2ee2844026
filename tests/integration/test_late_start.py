"""Tasks that start in any order, and later than they are waited for."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request

from tests.harness import Stage
from zmqtrain.errors import ExitCode


def test_late_tasks_are_waited_for_with_one_line_and_more_workers_may_come_and_go(
    stage: Stage,
) -> None:
    cluster = stage.cluster(stage.job(gated=True, steps=400, policy="sync-replicas"), ps=2)
    chief, worker = cluster.start("chief"), cluster.start("worker", 0)
    for task in (chief, worker):
        task.until_line(f"waiting for ps 0: .*{cluster.leader} has not answered the join yet")
    servers = [cluster.start("ps", index) for index in (1, 0)]
    cluster.until_status(lambda status: status.step > 0, "the first steps")

    more = cluster.start("worker", 1, "--workers", "2")
    cluster.until_status(
        lambda status: any(t.task == "worker 1" and t.step > 1 for t in status.tasks),
        "steps of worker 1",
    )
    more.signal(signal.SIGTERM)
    assert more.exit_code() == ExitCode.TERMINATED
    stage.open_gate()
    assert [task.exit_code() for task in (chief, worker, *servers)] == [0] * 4, stage.report
    assert "global step 400," in chief.output
    for task in (chief, worker):
        assert len(task.lines(r"waiting for ps 0: .*has not answered the join yet")) == 1, str(task)


def test_ps_is_ready_once_it_listens_so_that_the_chief_can_find_it(stage: Stage) -> None:
    """An engine that waits for readiness would otherwise not give it a name."""
    ps = stage.cluster(stage.job()).start("ps")
    url = ps.until_line("metrics at ").rpartition(" ")[2].removesuffix("metrics")

    def answer(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url + path, timeout=10) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    stage.until(lambda: answer("readyz") == (200, "waiting for the chief\n"), "readiness")
    assert answer("readyz?all") == (503, "waiting for the chief\n")
    ps.signal(signal.SIGTERM)
    assert ps.exit_code() == ExitCode.TERMINATED
