"""Forecasts of large clusters: what must follow from the costs does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from click.testing import Result

from bench.forecast import Cluster, Costs, Forecast, Simulation, Stragglers, StuckError
from bench.simulate import compare
from zmqtrain.policies import Decision, Held
from zmqtrain.policies.hogwild import Hogwild

COSTS = Costs(
    compute_s=0.1,
    spread=0.0,
    update_s=0.001,
    take_s=0.0002,
    decide_s=0.0,
    message_s=0.00001,
    item_s=0.000001,
    round_trip_s=0.0006,
)
PERIOD_S = 0.1 + 0.0006 + 0.0002 + 0.001  # of one worker alone, on one ps
PAUSES = Stragglers(chance=0.1, pause_s=0.5)


def foreseen(
    policy: str,
    workers: int = 4,
    ps: int = 1,
    costs: Costs = COSTS,
    stragglers: Stragglers = Stragglers(),  # noqa: B008  # it is frozen
    gradients: int = 50,
) -> Forecast:
    cluster = Cluster(workers, ps, costs, stragglers, seed=1)
    return Simulation(policy, cluster).run(gradients * workers)


def rate(forecast: Forecast) -> float:
    """Return gradients a second."""
    return forecast.gradients / forecast.seconds


@pytest.mark.parametrize(
    "policy", ["hogwild", "bounded-staleness:0", "sync-replicas", "sync-replicas:aggregate=1"]
)
def test_lone_worker_takes_what_its_parts_take(policy: str) -> None:
    forecast = foreseen(policy, workers=1)
    assert rate(forecast) == pytest.approx(1 / PERIOD_S)
    assert forecast.steps == forecast.gradients
    assert forecast.computing == pytest.approx(0.1 / PERIOD_S)


BUSY = replace(COSTS, update_s=0.004)


def test_ps_that_has_too_much_to_do_sets_the_pace() -> None:
    forecast = foreseen("hogwild", workers=100, costs=BUSY)
    assert rate(forecast) == pytest.approx(1 / 0.0042, rel=0.01)
    assert forecast.lead_busy == pytest.approx(1.0, rel=0.01)


def test_reports_of_many_ps_keep_the_leader_busy_though_they_travel_together() -> None:
    """A coordinated policy hears of every push from every other ps."""
    costs = replace(COSTS, message_s=0.0002, item_s=0.0001, update_s=0.0)
    alone, coordinated = (
        foreseen(policy, workers=400, ps=16, costs=costs)
        for policy in ("hogwild", "bounded-staleness:1000")
    )
    assert rate(alone) == pytest.approx(400 / (0.1 + 0.0006 + 0.0002), rel=0.02)
    per_push = 0.0002 + 15 * 0.0001 + 2 * 0.0001  # taken in, reported, applied and released
    assert coordinated.lead_busy > 0.7
    assert 0.7 / per_push < rate(coordinated) < 1 / per_push


def test_synchronous_step_takes_as_long_as_its_slowest_worker() -> None:
    slow = Stragglers(share=0.1, factor=5.0)
    forecast = foreseen("sync-replicas", workers=10, stragglers=slow)
    assert forecast.steps / forecast.seconds == pytest.approx(1 / 0.5, rel=0.05)
    assert forecast.staleness["max"] == 0


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_bounded_staleness_is_bounded(bound: int) -> None:
    forecast = foreseen(f"bounded-staleness:{bound}", workers=6, stragglers=PAUSES)
    assert 0 < forecast.staleness["max"] <= (2 * bound + 1) * 5


def test_same_seed_foresees_the_same() -> None:
    costs = replace(COSTS, spread=0.5)
    once, again = (
        replace(foreseen("bounded-staleness:1", costs=costs, stragglers=PAUSES), decide_s=0.0)
        for _ in range(2)
    )
    assert once == again


class Mute(Hogwild):
    """Lets nobody in."""

    def join(self, worker: int) -> list[Decision]:
        return []

    def held(self) -> Iterable[Held]:
        return [Held(0, "nobody is let in", ())]


def test_policy_that_lets_nobody_go_on_is_told(
    monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Result]
) -> None:
    monkeypatch.setattr("bench.forecast.make_policy", lambda spec: Mute())
    with pytest.raises(StuckError, match="nobody is let in"):
        foreseen("mute")
    result = invoke("simulate", "--workers", "2", "--ps", "1")
    assert result.exit_code == 1
    assert "everybody waits: nobody is let in" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--straggler", "slow:2:2"], "expected slow:SHARE:FACTOR"),
        (["--straggler", "slow"], "expected slow:SHARE:FACTOR"),
        (["--straggler", "slow:0.1:2,slow:0.2:3"], "has slow twice: expected it once"),
        (["--straggler", "late:0.1:2"], "'late:0.1:2'"),
        (["--policy", "never"], "unknown policy 'never'"),
        (["--compare", "--straggler", "slow:0.1:2"], "--compare knows pauses alone"),
    ],
)
def test_mistake_is_told(arguments: list[str], text: str, refusal_of: Callable[..., str]) -> None:
    assert text in refusal_of("simulate", *arguments)


def test_forecast_can_be_held_against_a_real_run() -> None:
    costs = replace(COSTS, compute_s=0.0005)
    row = compare("sync-replicas", costs, Stragglers(), seed=0)
    assert row["foreseen_per_second"] == pytest.approx(
        2 / (0.0005 + 0.0006 + 2 * 0.0002 + 2 * 0.0001), rel=0.05
    )
    assert row["measured_per_second"] > 0
