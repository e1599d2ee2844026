from __future__ import annotations

import pytest

from tests.clock import Clock, StopClock
from zmqtrain.actors import waits as waits_module
from zmqtrain.actors.waits import Waits
from zmqtrain.protocol.status import Wait


@pytest.fixture
def clock(stop_clock: StopClock) -> Clock:
    return stop_clock(waits_module)


def test_wait_has_owner_peer_reason_and_times(clock: Clock) -> None:
    waits = Waits("worker 2")
    waits.begin("ps 0", "it has not answered push 3")
    clock.now += 1.5
    waits.begin("ps 1", "it has not welcomed us", timeout_s=4.0)
    waits.limits = {"ps 0": lambda: clock.now + 59.0, "ps 1": lambda: None}
    clock.now += 1.0
    assert waits.snapshot() == (
        Wait("worker 2", "ps 0", "it has not answered push 3", 2.5, 59.0),
        Wait("worker 2", "ps 1", "it has not welcomed us", 1.0, 3.0),
    )


def test_wait_lasts_as_long_as_its_block_even_if_that_fails(clock: Clock) -> None:
    waits = Waits("chief 0")
    with pytest.raises(ValueError), waits.on("ps 0", "the manifest"):
        assert waits.snapshot() == (Wait("chief 0", "ps 0", "the manifest", 0.0),)
        raise ValueError
    assert waits.snapshot() == ()


def test_long_wait_is_logged_once_with_the_reason_of_the_peer(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    waits = Waits("chief 0")
    waits.begin("ps 0", "it has not reported the status")
    waits.begin("ps 1", "it has not welcomed us")
    waits.hosts = {"ps 1": "worker 3"}
    debugged = "process 7 is held by a debugger"
    waits.halts = {"ps 0": lambda: debugged, "ps 1": str}
    for _ in range(2):
        clock.now += 1.5
        waits.log_long()
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", f"waiting for ps 0: it has not reported the status; {debugged}"),
        ("INFO", "waiting for ps 1, which worker 3 hosts: it has not welcomed us"),
    ]
