"""What the tasks of a run counted, as their metrics tell it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bench.counting import Counting, samples_of
from zmqtrain.observe import health
from zmqtrain.observe.metrics import Metrics
from zmqtrain.wire.messages import Status

TASKS = ("ps 0", "worker 0", "worker 1", "worker 10")

PAGE = """\
# HELP zmqtrain_steps_total Steps that this worker finished.
# TYPE zmqtrain_steps_total counter
zmqtrain_steps_total 3.0
# HELP zmqtrain_phase_duration_seconds One phase of a step.
# TYPE zmqtrain_phase_duration_seconds histogram
zmqtrain_phase_duration_seconds_bucket{phase="data",le="0.1"} 2.0
zmqtrain_phase_duration_seconds_bucket{phase="data",le="+Inf"} 3.0
zmqtrain_phase_duration_seconds_count{phase="data"} 3.0
zmqtrain_phase_duration_seconds_sum{phase="data"} 0.75
# HELP process_open_fds Number of open file descriptors.
# TYPE process_open_fds gauge
process_open_fds 8.0
"""


class Tasks:
    """Tasks that serve their metrics, and are looked at."""

    def __init__(self, stack: ExitStack, status_of: Callable[..., Status]) -> None:
        self.metrics = {task: Metrics(*_role_and_index(task)) for task in TASKS}
        self._status_of = status_of
        self._addresses = {}
        for task, metrics in self.metrics.items():
            server = health.serve(metrics, "127.0.0.1", 0, lambda: (True, ""), lambda: 0.0)
            stack.callback(server.close)
            self._addresses[task] = f"{server.address}:{server.port}"

    def status(self, step: int, stop: str = "") -> Status:
        chief = {"chief 0": "127.0.0.1:1"}  # nobody listens there
        return self._status_of(step, 100, stop=stop, metrics=self._addresses | chief)


def _role_and_index(task: str) -> tuple[str, int]:
    role, index = task.split()
    return role, int(index)


@pytest.fixture
def tasks(status_of: Callable[..., Status]) -> Iterator[Tasks]:
    with ExitStack() as stack:
        yield Tasks(stack, status_of)


def test_page_becomes_values_by_name_and_label_without_buckets() -> None:
    assert samples_of(PAGE) == {
        ("steps_total", ""): 3.0,
        ("phase_duration_seconds_count", "data"): 3.0,
        ("phase_duration_seconds_sum", "data"): 0.75,
        ("process_open_fds", ""): 8.0,
    }


def test_what_was_counted_before_the_first_look_is_left_out(tasks: Tasks) -> None:
    counting, steps = Counting(), tasks.metrics["worker 0"].steps
    counting(tasks.status(0))
    steps.inc(7)
    counting(tasks.status(7))
    steps.inc(2)
    counting(tasks.status(9))
    steps.inc(1)
    counting(tasks.status(100, "done"))
    assert counting.sum("worker 0", "steps_total") == 3


def test_run_that_is_half_over_at_the_first_look_is_counted_from_its_start(tasks: Tasks) -> None:
    counting, steps = Counting(), tasks.metrics["worker 0"].steps
    steps.inc(51)
    counting(tasks.status(51))
    steps.inc(49)
    counting(tasks.status(100, "done"))
    assert counting.sum("worker 0", "steps_total") == 100


def test_evaluation_after_the_last_step_does_not_count(tasks: Tasks) -> None:
    counting, sent = Counting(), tasks.metrics["ps 0"].bytes_sent
    sent.inc(5)
    counting(tasks.status(100, "done"))
    sent.inc(1000)
    counting(tasks.status(100, "done"))
    assert counting.sum("ps 0", "bytes_sent_total") == 5


def test_all_tasks_of_a_role_are_added_up_and_one_is_told_from_others(tasks: Tasks) -> None:
    for count, task in enumerate(TASKS):
        tasks.metrics[task].bytes_sent.inc(10**count)
    counting = Counting()
    counting(tasks.status(100, "done"))
    sums = [counting.sum(name, "bytes_sent_total") for name in ("ps", "worker", "worker 1")]
    assert sums == [1, 1110, 100]


def test_mean_is_over_all_that_was_observed(tasks: Tasks) -> None:
    for task, seconds in (("worker 0", 1.0), ("worker 0", 2.0), ("worker 1", 6.0)):
        tasks.metrics[task].phase_duration_seconds.push.observe(seconds)
    counting = Counting()
    counting(tasks.status(100, "done"))
    assert counting.mean("worker", "phase_duration_seconds", "push") == 3.0
    assert counting.mean("worker", "phase_duration_seconds", "pull") == 0.0
