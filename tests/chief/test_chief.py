"""When the chief may end a job, and what a new generation means for it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import cast

import pytest

from tests.chief.test_progress import STATUS
from tests.exchanges.test_contract import make_job
from zmqtrain.actors.link import Link
from zmqtrain.chief.chief import Chief
from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.chief.on_the_way import OnTheWay
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import Message, Parameters, Status


class Shard:
    """A link to a shard that is at one version after another."""

    def __init__(self, versions: list[int]) -> None:
        self.versions = versions

    async def request(self, message: Message, reason: str) -> Envelope:
        return Envelope(Parameters(self.versions.pop(0)), Sender("ps", 0))


class ToldChief(Chief):
    """A chief that is told of one status after another."""

    def __init__(self, told: list[tuple[int, bool]], versions: list[int]) -> None:
        config = TaskConfig(role=Role.CHIEF, job="job", ps=("ipc://memory/0",), workers=1)
        super().__init__(config, make_job(), MemoryTransport(), lambda status: None)
        self._told = told
        self._links = [cast(Link, Shard(versions))]

    async def status(self, seen: int = 0, wait_s: float = 0.0) -> Status:
        step, delivered = self._told.pop(0)
        return replace(STATUS, step=step, all_delivered=delivered)


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

    with caplog.at_level(logging.WARNING):
        await ToldChief(told, versions)._wait_for_shards()
    assert (told, versions) == ([], [])
    assert ("the shards end at versions" in caplog.text) is is_given_up


async def test_new_generation_is_evaluated_anew_at_the_steps_of_the_one_before() -> None:
    chief = ToldChief([], [0])
    job = make_job(evaluate_every=10)
    dataset = job.load_data()[0]
    chief._evaluator = Evaluator(job, dataset, chief.metrics, chief.read_parameters)
    chief._on_the_way = OnTheWay(chief._evaluator, chief, every=10, steps=job.steps)
    chief._chosen = job.initial_values()
    for step in (10, 20):
        assert chief._evaluator.is_due(step)
        await chief._evaluator.report(step)
    assert not chief._evaluator.is_due(20)
    await chief._initialize(None, 2)
    assert chief._evaluator.is_due(20)
