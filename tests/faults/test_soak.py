"""The soak runs both sides in turn and says how to repeat what failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.run import Report
from simulation.schedule import Fault, draw
from tests.faults import soak

BAD_SEED = 9


def run_seed(seed: int) -> Report:
    kill = Fault(0.1, "kill", ("worker 0",))
    broken = "something broke" if seed == BAD_SEED else ""
    return Report(replace(draw(seed), faults=(kill,)), broken, 1)


def test_soak_goes_on_until_its_time_is_up_and_says_how_to_repeat_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(side: soak.Side, seed: int) -> None:
        side.runs += 1
        side.fail(f"headline {seed}", "a promise was broken")

    monkeypatch.setattr(soak, "BATCH", 3)
    monkeypatch.setattr(soak, "run_seed", run_seed)
    monkeypatch.setattr(soak, "run_processes", fail)
    looks = iter([False] * 4)
    simulated, real = soak.soak(7, lambda: next(looks, True), map)
    assert (simulated.runs, simulated.kills, real.runs) == (6, 5, 2)
    assert simulated.failed == [f"python -m simulation --seed {BAD_SEED}"]
    assert real.failed == ["headline 7", "headline 8"]
    soak.tell((simulated, real))
    told = capsys.readouterr().out
    assert all(f"replay: {replay}\n" in told for replay in simulated.failed + real.failed)
