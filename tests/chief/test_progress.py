"""Progress display of a run in a script or a notebook."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tests.clock import StopClock
from zmqtrain.chief import progress
from zmqtrain.chief.job_view import JobView
from zmqtrain.chief.progress import ProgressDisplay, line
from zmqtrain.coordination.peers import A_WORKER
from zmqtrain.protocol.status import Status, Wait
from zmqtrain.units import duration

STATUS = Status(
    event=0, initialised=True, policy="hogwild", switching="", step=5, steps=20, stop="",
    failure="", failure_code=0, all_delivered=True, save_wanted=False, seconds=1.0,
    steps_per_second=50.0, loss=0.25, examples=500,
    pushes={"applied": 5, "dropped": 0, "refused": 0, "duplicate": 0},
    staleness={"mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}, tasks=(), waits=(),
)  # fmt: skip


@pytest.mark.parametrize("steps", [20, 0])
def test_terminal_shows_a_bar_that_is_gone_at_the_end(steps: int) -> None:
    console = Console(force_terminal=True, width=120)
    with console.capture() as capture:
        display = ProgressDisplay(console)
        display(replace(STATUS, steps=steps))
        display.close()
    shown = capture.get()
    assert "50 steps/s  loss 0.2500" in shown
    assert "20" in shown if steps else "5/?" in shown
    assert shown.endswith("\x1b[2K")


def test_bar_is_drawn_when_steps_were_made_alone() -> None:
    file = StringIO()
    display = ProgressDisplay(Console(file=file, force_terminal=True))
    display(STATUS)
    shown = file.getvalue()
    display(replace(STATUS, seconds=9.0, steps_per_second=5.0))  # as at a breakpoint
    assert file.getvalue() == shown
    display.close()


def test_elsewhere_the_log_gets_a_line(caplog: pytest.LogCaptureFixture) -> None:
    console = Console(force_terminal=False)
    with caplog.at_level(logging.INFO, ProgressDisplay.__module__), console.capture() as capture:
        display = ProgressDisplay(console)
        display(STATUS)
        display.close()
    assert capture.get() == ""
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("kind", "has_lines"),
    [("file", True), ("dumb", True), ("terminal", False), ("notebook", False)],
)
def test_script_without_a_bar_writes_a_plain_line_less_and_less_often(
    kind: str, has_lines: bool, stop_clock: StopClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, file = stop_clock(progress), StringIO()
    monkeypatch.setenv("TERM", "dumb" if kind == "dumb" else "xterm")
    console = Console(
        file=file, force_terminal=kind in ("terminal", "dumb"), force_jupyter=kind == "notebook"
    )
    display = ProgressDisplay(console, with_bar=False)
    for step in range(25):
        display(replace(STATUS, step=step))
        clock.tick()
    display.close()
    lines = [f"step {step}/20  50 steps/s  loss 0.2500\n" for step in (2, 4, 8, 16)]
    assert file.getvalue() == "".join(lines * has_lines)


@pytest.mark.parametrize(
    ("uncounted", "shown", "share"),
    [
        (0, "epoch 1 of 4", 0.0),
        (9, "epoch 1 of 4", 0.225),
        (10, "epoch 2 of 4", 0.25),
        (40, "epoch 4 of 4", 1.0),
    ],
)
def test_line_of_a_job_with_epochs_names_the_one_under_way(
    uncounted: int, shown: str, share: float
) -> None:
    status = replace(STATUS, steps=0, epochs=4, epoch_batches=10, uncounted=uncounted)
    assert line(status).startswith(f"step 5  {shown}  50 steps/s")
    assert status.done == pytest.approx(share)
    assert JobView.of(status).figures()["step"].startswith(f"5, {shown} ({100 * share:.1f} %)")


def test_time_left_of_a_job_with_epochs_is_that_of_its_batches() -> None:
    """Of 40 batches 10 are counted, in 5 steps; the other 15 take 0.3 s at 50 steps/s."""
    status = replace(STATUS, steps=0, epochs=4, epoch_batches=10, uncounted=10)
    assert JobView.of(status).remaining == f", about {duration(0.3)} left"
    for unknown in (replace(status, epoch_batches=0), replace(status, steps_per_second=0.0)):
        assert JobView.of(unknown).remaining == ""


@pytest.mark.parametrize(
    ("seconds", "applied", "shown"),
    [
        (0.0, 0, "step 5/20  - steps/s  loss -"),
        (0.0, 5, "step 5/20  - steps/s  loss -"),  # ps 0 was started again
        (1.0, 5, "step 5/20  50 steps/s  loss nan"),  # it diverges
    ],
)
def test_line_has_a_loss_once_a_worker_has_sent_one(
    seconds: float, applied: int, shown: str
) -> None:
    pushes = STATUS.pushes | {"applied": applied}
    assert shown in line(replace(STATUS, seconds=seconds, loss=math.nan, pushes=pushes))


def test_line_without_workers_tells_when_the_job_ends() -> None:
    wait = Wait("ps 0", A_WORKER, "no worker is alive", 10.0, 290.0)
    assert line(replace(STATUS, waits=(wait,))).endswith(
        "workers: none has loaded the job yet; the job ends in 290 s unless one joins"
    )
    assert line(STATUS).endswith("workers: none")
