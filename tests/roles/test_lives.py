"""Tasks that begin, come back or end while others do: what each must know of the lives before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.tales import Tale, calm, tale_of
from zmqtrain.errors import FencedError
from zmqtrain.roles.ps import ParameterServer
from zmqtrain.simulation import stand_ins
from zmqtrain.simulation.run import STARTS_AT
from zmqtrain.simulation.schedule import Fault
from zmqtrain.timing import Timing

SET_BACK_AT_S = 1.1
USUAL = calm(
    steps=40,
    lane="memory",
    save_secs=1000.0,
    timing=Timing(heartbeat_s=0.1, lease_s=0.4, join_timeout_s=20, peer_timeout_s=12, grace_s=4),
)


def run(*faults: Fault, **fields: Any) -> Tale:
    return tale_of(replace(USUAL, faults=faults, **fields))


class WallClock:
    """Stands where the simulator has the Unix time at which it began: it is set back an hour."""

    def __add__(self, now: float) -> float:
        return 1.6e9 + now - (3600.0 if now >= STARTS_AT + SET_BACK_AT_S else 0.0)


@pytest.mark.parametrize("lane", ["shm", "memory"], ids=["its memory", "a checkpoint"])
def test_ps_numbers_a_new_life_above_the_last_one_which_it_knows_only_from(
    lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker died as the youngest of all. Another shard knows it and lets no older life in."""
    monkeypatch.setattr(stand_ins, "UNIX_S", WallClock())
    faults = [
        Fault(0.1, "kill", ("worker 1",), 0.7),
        Fault(1.2, "kill", ("worker 1",), 1.4),
        Fault(1.9, "kill", ("ps 0",), 0.2),
    ]
    if lane == "memory":
        faults.append(Fault(1.0, "save"))
    tale = run(*faults, lane=lane, keeps=lane == "memory", slow=0)
    assert len(tale.of("ps 1 says: worker 1 joined")) == 3
    assert not tale.of("has a newer life already")


def test_chief_begins_again_when_its_first_begin_comes_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a ps has a new life that the chief has not joined."""
    initialize, came = ParameterServer._on_initialize, []

    def refuse_the_first(ps: ParameterServer, request: Any) -> None:
        came.append(request)
        if len(came) == 1:
            raise FencedError("chief 0 has not joined")
        initialize(ps, request)

    monkeypatch.setattr(ParameterServer, "_on_initialize", refuse_the_first)
    tale = run(ps=1, steps=4)
    assert tale.of("chief 0 says: ps 0: chief 0 has not joined; joining again")
    assert tale.of("chief 0 ended: exit code 0")


def test_new_chief_does_not_begin_anew_what_some_shard_has_learned() -> None:
    tale = run(Fault(0.5, "kill", ("ps 1",), 0.1), Fault(0.5, "kill", ("chief 0",), 0.3))
    assert tale.of("ps 1 restarted without parameters, and there is no checkpoint to go back to")
    assert not tale.of("epoch 2 begins")


def test_ps_does_not_end_before_a_worker_that_was_stopped_when_the_job_ended() -> None:
    """It was silent for longer than a goodbye takes, and for less than three heartbeats."""
    timing = Timing(heartbeat_s=1.5, lease_s=6.0)
    stops = Fault(1.0, "stop", ("chief 0",), 9.0), Fault(9.9, "stop", ("worker 1",), 3.0)
    tale = run(*stops, ps=1, timing=timing)
    assert tale.of("worker 1 ended: exit code 0")
