"""Evaluations while a cluster trains on: which steps they are of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.chief.background import BackgroundEvaluations
from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.data import Arrays
from zmqtrain.errors import FencedError, RefusedError
from zmqtrain.job import Job
from zmqtrain.models import LinearRegression
from zmqtrain.observe.metrics import Metrics
from zmqtrain.optim import SGD

STEPS = 100


class Cluster:
    """Shards at some versions, which keep one each; ``moves`` happen while it is asked."""

    def __init__(self, shards: int = 2) -> None:
        self.generation = 1
        self.versions = [0] * shards
        self.kept = [0] * shards
        self.moves: list[list[int]] = []
        self.error: Exception | None = None  # what a read comes to
        self.read: list[int] = []
        self.readers: dict[str, Any] = {}  # of tables
        self.asked: list[tuple[int, int]] = []

    async def keep(self, version: int, done: int) -> list[int]:
        self.asked.append((version, done))
        if self.moves:
            self.versions = self.moves.pop(0)
        for shard, at in enumerate(self.versions):
            if version > at:
                self.kept[shard] = version
        return self.versions

    def tables(self, at: int = 0) -> dict[str, Any]:
        return self.readers

    async def read_parameters(self, average: bool = False, at: int = 0) -> Any:
        if self.error is not None:
            raise self.error
        assert self.kept == [at] * len(self.kept)
        assert min(self.versions) >= at
        self.read.append(at)
        return LinearRegression(2).parameters(0)


class Watched:
    """The evaluations of a job that is evaluated every 10 steps, and what they are made of."""

    def __init__(self, *, model: Any = None, every: int = 10) -> None:
        data = Arrays((np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)), None)
        job = Job(
            model=model or LinearRegression(2), data=data, optimizer=SGD(0.1),
            evaluate_every=every, steps=STEPS,
        )  # fmt: skip
        self.cluster = Cluster()
        self.evaluator = Evaluator(job, data.load(None)[0], Metrics("chief"), self._cannot_read)
        self.made = BackgroundEvaluations(self.evaluator, self.cluster, every=every, steps=STEPS)

    async def come_to(self, *versions: int) -> None:
        self.cluster.versions = list(versions)
        await self.made.follow(versions[0])

    @property
    def steps(self) -> list[int]:
        assert self.cluster.read == [row["step"] for row in self.evaluator.evaluations]
        return self.cluster.read

    async def _cannot_read(self, average: bool) -> Any:
        raise AssertionError("the parameters of now are of no step that was asked for")


@pytest.mark.parametrize(
    ("every", "versions", "steps", "kept"),
    [
        (10, [(0, 0), (9, 9), (12, 13), (13, 13), (20, 21), (39, 38)], [10, 20, 30], 40),
        (10, [(30, 30), (35, 35), (41, 41)], [40], 50),  # it goes on from any step
        (10, [(0, 0), (34, 35)], [10], 40),  # steps that were passed meanwhile are skipped
        (50, [(0, 0), (60, 60), (STEPS, STEPS)], [50], 50),  # the last one is left to the end
        (0, [(0, 0)], [], 0),
    ],
)
async def test_steps_are_those_that_were_asked_for(
    every: int, versions: list[tuple[int, int]], steps: list[int], kept: int
) -> None:
    job = Watched(every=every)
    for each in versions:
        await job.come_to(*each)
    assert (job.steps, job.cluster.kept) == (steps, [kept, kept])


async def test_ps_that_is_a_little_behind_is_waited_for() -> None:
    job = Watched()
    await job.come_to(0, 0)
    job.cluster.moves = [[10, 9], [10, 9], [10, 10]]
    await job.come_to(10, 8)
    assert job.steps == [10]


async def test_ps_that_stays_behind_holds_nobody_up() -> None:
    """Without a common decision a push may never come to all of them."""
    job = Watched()
    await job.come_to(0, 0)
    await job.come_to(11, 9)
    assert not job.steps
    await job.come_to(14, 12)
    assert job.steps == [10]


async def test_step_that_only_some_shards_had_not_passed_is_not_asked_for() -> None:
    """The next one is further ahead each time, so it is not passed again and again."""
    job = Watched(every=1)
    job.cluster.moves = [[1, 0], [2, 3], [6, 6]]
    await job.come_to(0, 0)
    assert job.cluster.kept == [7, 7]
    await job.come_to(8, 7)
    assert job.steps == [7]


async def test_restarted_ps_has_forgotten_the_step_and_the_next_one_is_evaluated() -> None:
    job = Watched()
    await job.come_to(0, 0)
    job.cluster.error = RefusedError("ps 1 has not kept version 10")
    await job.come_to(11, 11)
    assert not job.steps
    job.cluster.error = None
    await job.come_to(20, 20)
    assert job.steps == [20]


async def test_restarted_ps_keeps_the_step_that_is_still_to_come() -> None:
    job = Watched()
    await job.made.ask_again()
    assert job.cluster.kept == [0, 0]  # none was asked for
    await job.come_to(3, 3)
    job.cluster.kept[1] = 0
    await job.made.ask_again()
    await job.come_to(10, 10)
    assert job.steps == [10]


async def test_ps_that_does_not_know_the_chief_has_it_join_again() -> None:
    job = Watched()
    await job.come_to(0, 0)
    job.cluster.error = FencedError("ps 1 does not know this life any more")
    with pytest.raises(FencedError):
        await job.come_to(10, 10)


async def test_generation_that_goes_back_is_asked_anew() -> None:
    job = Watched()
    for version in (0, 10, 20, 30):
        await job.come_to(version, version)
    job.cluster.generation = 2
    job.cluster.kept, job.cluster.read = [0, 0], [10]
    for version in (15, 21):
        await job.come_to(version, version)
    assert job.steps == [10, 20]


class Failing(LinearRegression):
    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        raise ValueError("no")


async def test_rows_are_kept_until_their_evaluation_is_over() -> None:
    job = Watched(every=50)
    job.cluster.readers = {"user": None}
    for version in (3, 51, 99):
        await job.come_to(version, version)
    assert job.cluster.asked == [(50, 3), (50, 3), (0, STEPS)]
    assert job.steps == [50]


async def test_evaluation_beside_the_next_version_lets_go_of_its_own_alone() -> None:
    job = Watched()
    job.cluster.readers = {"user": None}
    for version in (0, 10):
        await job.come_to(version, version)
    assert job.cluster.asked == [(10, 0), (10, 0), (20, 9), (20, 10)]


async def test_evaluation_that_fails_is_the_last_before_the_end_and_lets_everything_go() -> None:
    job = Watched(model=Failing(2))
    for version in (0, 10, 20):
        await job.come_to(version, version)
    assert (job.cluster.read, job.evaluator.evaluations) == ([10], ())
    assert job.cluster.asked[-1] == (0, STEPS)
    await job.made.ask_again()  # a ps was restarted
    assert job.cluster.asked[-1] == (0, STEPS)


@pytest.mark.parametrize("error", [RefusedError, FencedError])
@pytest.mark.parametrize(("every", "asked"), [(10, (20, 10)), (STEPS // 2 + 1, (0, STEPS))])
async def test_rows_that_are_lost_while_they_are_evaluated_end_only_this_evaluation(
    error: type[RefusedError], every: int, asked: tuple[int, int]
) -> None:
    """Every ps is told so, be it the last one: else it would copy rows for it until the end."""

    class Lost(LinearRegression):
        def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
            raise error("gone")

    job = Watched(model=Lost(2), every=every)
    job.cluster.readers = {"user": None}
    await job.come_to(0, 0)
    if error is FencedError:
        with pytest.raises(FencedError):
            await job.come_to(every, every)
        await job.made.ask_again()
    else:
        await job.come_to(every, every)
    assert job.cluster.asked[-1] == asked
    assert not job.made.is_done
