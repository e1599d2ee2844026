"""When the chief may end a job: once every shard has all that it will get."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.chief.chief import Chief
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import Parameters


@pytest.mark.parametrize(
    ("told", "versions", "is_given_up"),
    [
        ([(10, False), (10, False)], [10], False),
        ([(9, True), (10, False), (10, False)], [9, 10], False),
        ([(10, False), (10, True), (10, True)], [9, 10], False),
        ([(10, True), (10, True)], [9], True),
    ],
    ids=["level", "a step was made since", "the last update came since", "it cannot come"],
)
async def test_shards_are_asked_until_they_are_level_or_nothing_was_on_its_way(
    told: list[tuple[int, bool]],
    versions: list[int],
    is_given_up: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``told``: step and whether all is delivered, of one status after another."""

    async def status() -> Any:
        step, delivered = told.pop(0)
        return SimpleNamespace(step=step, all_delivered=delivered)

    async def request(message: Any, reason: str) -> Any:
        return Envelope(Parameters(versions.pop(0)), Sender("ps", 0))

    chief: Any = SimpleNamespace(status=status, _links=[SimpleNamespace(request=request)])
    with caplog.at_level(logging.WARNING):
        await Chief._wait_for_shards(chief)
    assert (told, versions) == ([], [])
    assert ("the shards end at versions" in caplog.text) is is_given_up
