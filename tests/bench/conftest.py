from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from zmqtrain.wire.messages import Status, TaskStatus


@pytest.fixture
def invoke() -> Callable[..., Result]:
    """Runs `python -m bench` with these arguments, in this process."""
    return _invoke


@pytest.fixture
def rows_of() -> Callable[..., list[dict[str, Any]]]:
    """Runs a benchmark that succeeds; returns its rows."""
    return _rows_of


@pytest.fixture
def refusal_of() -> Callable[..., str]:
    """Runs a benchmark that refuses its options; returns what it says of them, as one line."""
    return _refusal_of


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What training runs were told beside their training; no process is started."""
    from bench.training import Training

    started: list[dict[str, str]] = []

    def fake(self: Training, look: Any, **options: str) -> Any:
        started.append(options)
        return SimpleNamespace(steps_per_second=100.0, accuracy=0.5, loss=1.0)

    monkeypatch.setattr(Training, "run", fake)
    return started


@pytest.fixture
def status_of() -> Callable[..., Status]:
    """Makes the status of a run, as a look of the chief gets it."""
    return _status_of


def _invoke(*arguments: str) -> Result:
    from bench.__main__ import main

    return CliRunner().invoke(main, arguments)


def _rows_of(*arguments: str) -> list[dict[str, Any]]:
    result = _invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def _refusal_of(*arguments: str) -> str:
    result = _invoke(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.replace("│", " ").split())


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
            role=task.split()[0],
            index=int(task.split()[1]),
            state="alive",
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
