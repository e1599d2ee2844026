"""The benchmarks are no part of the package: they are imported from the project's root."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from zmqtrain.wire.messages import Status, TaskStatus

sys.path.append(str(Path(__file__).parents[2]))


@pytest.fixture
def status_of() -> Callable[..., Status]:
    """Makes the status of a run, as a look of the chief gets it."""
    return _status_of


def _status_of(
    step: int,
    steps: int,
    *,
    stop: str = "",
    metrics: Mapping[str, str] | None = None,
    pids: Mapping[str, int] | None = None,
) -> Status:
    """``metrics``: addresses by task; ``pids``: processes by task. Every step was worker 0's."""
    metrics, pids = metrics or {}, pids or {}
    tasks = [
        TaskStatus(
            task=task,
            state="",
            incarnation=1,
            step=step,
            silent_s=0.0,
            leases=(),
            loss=0.0,
            process=f"host:{pids.get(task, 1)}",
            metrics=metrics.get(task, ""),
            lanes="",
        )
        for task in {**metrics, **pids}
    ]
    return Status(
        event=1,
        initialised=True,
        policy="hogwild",
        switching="",
        step=step,
        steps=steps,
        stop=stop,
        failure="",
        failure_code=0,
        save_wanted=False,
        seconds=1.0,
        steps_per_second=1.0,
        loss=0.0,
        examples=step,
        pushes={},
        staleness={},
        tasks=tuple(tasks),
        waits=(),
    )
