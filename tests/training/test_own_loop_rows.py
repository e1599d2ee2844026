"""The rows of tables in a loop of the user's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.plans import planned
from tests.recommenders import Recommender, make_job
from zmqtrain import Job
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ConfigError, FencedError, PeerLostError, ZmqTrainError
from zmqtrain.hosting.actors import actors_of, chief_among, run_all
from zmqtrain.local.own_loop import Session
from zmqtrain.models.rows import RowSource
from zmqtrain.models.tables import Ids, Rows
from zmqtrain.observe.summary import Summary
from zmqtrain.training.own_loop import LoopBridge, RowsOfLoop
from zmqtrain.transport.memory import MemoryTransport


class Source(RowSource):
    """Raises an error, or returns zeros."""

    may_wait = True

    def __init__(self, error: ZmqTrainError | None) -> None:
        self.error, self.is_closed = error, False

    def read(self, wanted: Sequence[tuple[int, Ids]]) -> list[Rows]:
        if self.error is not None:
            raise self.error
        return [np.zeros((len(ids), 3), np.float32) for _, ids in wanted]

    def close(self) -> None:
        self.is_closed = True


IDS = np.array([1, 7])


@pytest.mark.parametrize("error", [FencedError("a new life"), PeerLostError("it is gone"), None])
def test_loop_of_the_user_meets_no_error_of_a_lost_ps(error: ZmqTrainError | None) -> None:
    tables = make_job().table_variables()
    (rows,) = RowsOfLoop(Source(error), tables).read([(1, IDS)])
    expected = np.zeros((2, 3)) if error is None else tables[1].initial_rows(IDS)
    np.testing.assert_array_equal(rows, expected)


def test_loop_of_the_user_meets_other_errors() -> None:
    with pytest.raises(ConfigError, match="wrong"):
        RowsOfLoop(Source(ConfigError("wrong")), make_job().table_variables()).read([(0, IDS)])


def train_by_messages(job: Job, on_start: object) -> tuple[int, Summary | None]:
    async def run() -> Summary | None:
        transport, plan = MemoryTransport(), planned(job, ps=2)
        config = TaskConfig(role=Role.CHIEF, job="job", ps=plan.ps, lane="tcp", crash_safe=False)
        actors = []
        for task in plan.tasks:
            actors += actors_of(config.of(task), plan, lambda _: transport, lambda status: None)
        await run_all(actors)
        transport.close()
        return chief_among(actors).summary

    return 0, asyncio.run(run())


def test_loop_of_the_user_evaluates_rows_without_compression() -> None:
    job = make_job(evaluate_every=2, compression="bf16")
    bridge, found = LoopBridge(job.model), []
    own = job.model_copy(update={"model": bridge})
    with Session(own, bridge, train_by_messages) as session:
        for batch in session.batches():
            found.append({"step": session.global_step} | session.evaluate())
            session.step(job.model.loss_and_gradients(*batch))
    assert session.summary is not None
    assert [*session.summary.evaluations[:-1]] == found[2::2]


class LosesItsPs(Recommender):
    is_lost = False  # also of the copy that evaluates

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        if LosesItsPs.is_lost:
            raise PeerLostError("ps 1 is gone")
        return super().metrics(parameters, batch)


def test_evaluation_of_a_loop_that_loses_a_ps_has_no_measures() -> None:
    job = make_job(model=LosesItsPs())
    bridge, found = LoopBridge(job.model), []
    own = job.model_copy(update={"model": bridge})
    with Session(own, bridge, train_by_messages) as session:
        for batch in session.batches():
            LosesItsPs.is_lost = session.steps == 1
            found.append(sorted(session.evaluate()))
            LosesItsPs.is_lost = False
            session.step(job.model.loss_and_gradients(*batch))
    assert found[:3] == [["loss"], [], ["loss"]]


@pytest.mark.parametrize("error", [FencedError("a new life"), PeerLostError("it is gone")])
def test_rows_for_an_evaluation_are_never_those_of_the_beginning(error: ZmqTrainError) -> None:
    rows = RowsOfLoop(Source(error), make_job().table_variables()).exact()
    with pytest.raises(type(error)):
        rows.read([(1, IDS)])


def test_rows_of_a_loop_end_with_their_source() -> None:
    source = Source(None)
    rows = RowsOfLoop(source, make_job().table_variables())
    rows.close()
    assert source.is_closed and rows.may_wait
