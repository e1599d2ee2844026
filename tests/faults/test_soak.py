"""The soak: what it counts, what it says of failures, and when it ends."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from simulation.run import Report
from simulation.schedule import Fault, draw
from tests.faults import soak

KILL = Fault(0.1, "kill", ("worker 0",))
BAD_SCHEDULE, BAD_RUN = 12, 8


def run_seed(seed: int) -> Report:
    schedule = replace(draw(seed), faults=(KILL, replace(KILL, kind="stop")))
    return Report(schedule, "something broke" if seed == BAD_SCHEDULE else "", 1)


@click.command()
@click.option("--seconds")
@click.option("--steps")
@click.option("--seed", type=int)
@click.option("--json", is_flag=True)
def headline(seed: int, **_: Any) -> None:
    for promise, seen in ((soak.KILLED, "4 kills"), ("nothing is left behind", "a process")):
        kept = promise == soak.KILLED or seed != BAD_RUN
        click.echo(json.dumps({"promise": promise, "kept": kept, "seen": seen}))
    sys.exit(seed == BAD_RUN)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "BATCH", 3)
    monkeypatch.setattr(soak, "run_seed", run_seed)
    monkeypatch.setattr(soak, "headline_command", headline)


def test_soak_goes_on_until_its_time_is_up_and_tells_what_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    looks = iter([False] * 6)
    simulated, real = soak.soak(7, lambda: next(looks, True), map)
    assert (simulated.runs, simulated.kills) == (9, 8)
    assert simulated.failed == [f"python -m simulation --seed {BAD_SCHEDULE}"]
    assert (real.runs, real.kills) == (3, 8)
    (replay,) = real.failed
    assert replay.startswith("python -m bench headline --")
    assert replay.endswith(f" --seed {BAD_RUN}")
    assert f"nothing is left behind: a process\nreplay: {replay}\n" in capsys.readouterr().out
    soak.tell((simulated, real))
    told = capsys.readouterr().out
    assert all(f"replay: {replay}\n" in told for replay in simulated.failed + real.failed)


def test_soak_of_no_time_runs_nothing() -> None:
    assert [side.runs for side in soak.soak(7, lambda: True, map)] == [0, 0]


@pytest.mark.parametrize(("seed", "code"), [(BAD_SCHEDULE - 1, 1), (BAD_SCHEDULE + 1, 0)])
def test_soak_exits_with_1_if_a_run_failed(
    monkeypatch: pytest.MonkeyPatch, seed: int, code: int
) -> None:
    pool = SimpleNamespace(imap_unordered=map)
    context = SimpleNamespace(Pool=lambda: nullcontext(pool))
    monkeypatch.setattr(soak, "get_context", lambda _: context)
    times = chain([0.0, 0.0], repeat(61.0))
    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=lambda: next(times)))
    result = CliRunner().invoke(soak.main, ["--minutes", "1", "--seed", str(seed)])
    assert result.exit_code == code
    assert result.output.startswith(f"seed {seed}\n")
