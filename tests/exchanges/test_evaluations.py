"""Workers measure parts of an evaluation while they are held, each with its own copy of a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

import zmqtrain
from zmqtrain import Job
from zmqtrain.actors.actor import Request
from zmqtrain.callbacks import Callback
from zmqtrain.data import Arrays
from zmqtrain.data.description import describe
from zmqtrain.exchanges.evaluations import Evaluations
from zmqtrain.metrics import MeanSquaredError
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.training.evaluation import evaluate, parts_of, rows_of
from zmqtrain.training.loop import TrainingLoop
from zmqtrain.training.own_loop import LoopBridge
from zmqtrain.wire.control import Evaluate, Evaluated

RANDOM = np.random.default_rng(5)
EXAMPLES, EVALUATED, BATCH = 24, 101, 2  # a prime
FEATURES = RANDOM.normal(size=(EXAMPLES + EVALUATED, 3)).astype(np.float32)
PARTS = len(parts_of(EVALUATED, rows_of(BATCH)))


@dataclass(frozen=True)
class Measured(LinearRegression):
    """A line. The chief has the first copy, and waits in part 0 until all others are measured."""

    waits: ClassVar[bool]
    by_chief: ClassVar[list[int]]  # rows of each batch
    by_workers: ClassVar[list[int]]
    others: ClassVar[threading.Semaphore]
    is_known: ClassVar[threading.Event]

    is_chiefs: bool = field(default=True, repr=False)

    def __deepcopy__(self, memo: object) -> Measured:
        return replace(self, is_chiefs=False)

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        rows = len(batch[0])
        if self.is_chiefs and not self.is_known.is_set():  # to learn the names
            self.is_known.set()
            return super().metrics(parameters, batch)
        if not self.is_chiefs:
            self.by_workers.append(rows)
            self.others.release()
        elif self.waits and np.array_equal(batch[0][0], FEATURES[EXAMPLES]):
            for _ in range(PARTS - 1):
                assert self.others.acquire(timeout=60)
        if self.is_chiefs:
            self.by_chief.append(rows)
        return super().metrics(parameters, batch)


@pytest.fixture(autouse=True)
def fresh() -> None:
    Measured.waits, Measured.others = True, threading.Semaphore(0)
    Measured.by_chief, Measured.by_workers = [], []
    Measured.is_known = threading.Event()


def job(**fields: Any) -> Job:
    targets = (FEATURES @ np.array([[1.0], [2.0], [-1.0]])).astype(np.float32)
    data = Arrays(
        (FEATURES[:EXAMPLES], targets[:EXAMPLES]), (FEATURES[EXAMPLES:], targets[EXAMPLES:])
    )
    return Job(
        model=Measured(3, 1),
        data=data,
        optimizer=SGD(0.1),
        policy="sync-replicas",
        batch_size=BATCH,
        metrics=[MeanSquaredError()],
        **fields,
    )


def alone(of_job: Job, parameters: Any) -> dict[str, Any]:
    _, data = of_job.load_data()
    assert data is not None
    rows = rows_of(BATCH)
    return evaluate(of_job.model, parameters, data, metrics=of_job.metrics, rows=rows)


@pytest.mark.parametrize(
    "place", [{"ps": 1}, {"ps": 2}, {"ps": 0}], ids=["one ps", "two ps", "none"]
)
def test_workers_measure_all_parts_but_the_chiefs_own_and_the_bits_are_the_same(
    place: dict[str, int],
) -> None:
    of_job = job(epochs=2)
    summary = zmqtrain.run(of_job, workers=2, **place)
    assert len(Measured.by_workers) == 2 * (PARTS - 1)  # the last epoch's is that of the end
    Measured.waits = False
    assert summary.measures == alone(of_job, summary.parameters)


def test_evaluation_at_the_end_of_a_job_without_epochs_is_shared_too() -> None:
    zmqtrain.run(job(steps=5), workers=2)
    assert len(Measured.by_workers) == PARTS - 1


class SetsWeights(Callback):
    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights([weights + 1 for weights in self.model.get_weights()])


def test_weights_that_a_callback_sets_at_the_end_are_measured_by_the_chief_who_has_them() -> None:
    Measured.waits = False
    of_job = job(epochs=1, callbacks=[SetsWeights()])
    summary = zmqtrain.run(of_job, workers=2)
    assert len(Measured.by_workers) <= PARTS - 1  # of the epoch
    assert summary.measures == alone(of_job, summary.parameters)


def test_workers_that_train_on_measure_nothing() -> None:
    Measured.waits = False
    summary = zmqtrain.run(job(steps=40, evaluate_every=10), workers=2)
    assert len(summary.evaluations) >= 2  # on the way, and the end
    on_the_way = len(summary.evaluations) - 1
    assert sum(Measured.by_chief) >= EVALUATED * on_the_way
    assert sum(Measured.by_workers) <= EVALUATED


class InOwnLoop(Measured):
    """Model with the methods that a user's own loop calls."""

    def begin(self) -> None: ...

    def finish(self) -> None: ...


@dataclass
class Alone:
    """One worker's evaluations, without a cluster; parts are measured when the loop is let go."""

    is_computing: bool = False
    versions: tuple[int, ...] = (7, 7)
    reads: int = 0
    sent: list[int] = field(default_factory=list)
    of_job: Job = field(default_factory=lambda: job(steps=1))
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    between: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        Measured.waits = False
        _, data = self.of_job.load_data()
        assert data is not None
        self.data, loop = describe(data), cast(TrainingLoop, self)
        self.evaluations = Evaluations(self.of_job, data, loop, self.read, self.spawn)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def read(self, average: bool) -> tuple[Any, list[int]]:
        self.reads += 1
        return self.of_job.initial_values(), list(self.versions)

    async def use_model(self, work: Callable[[], Any]) -> Any:
        self.between()
        return work()

    def send(self, message: Evaluated, tensors: Any) -> None:
        self.sent.append(message.part)

    async def ask(self, *parts: int, evaluation: str = "one", **fields: Any) -> list[int]:
        wanted = {"version": 7, "data": self.data} | fields
        message = Evaluate(0, evaluation, parts=parts, **wanted)
        self.evaluations.on_evaluate(cast(Request, self), message)
        await asyncio.gather(*self.tasks)
        return self.sent


async def test_worker_reads_the_parameters_once_for_each_evaluation() -> None:
    worker = Alone()
    assert await worker.ask(12, 11) == [12, 11]
    assert await worker.ask(3) == [12, 11, 3]
    assert worker.reads == 1
    await worker.ask(evaluation="one")  # it is over
    assert await worker.ask(0, evaluation="two") == [12, 11, 3, 0]
    assert worker.reads == 2


@pytest.mark.parametrize(
    ("worker", "fields"),
    [
        (Alone(versions=(7, 8)), {}),
        (Alone(), {"version": 8}),
        (Alone(), {"data": "101 examples of something else"}),
        (Alone(is_computing=True), {}),
        (Alone(of_job=job(steps=1).model_copy(update={"model": LoopBridge(InOwnLoop(3, 1))})), {}),
    ],
    ids=["another version of a shard", "another version", "other data", "a step", "an own loop"],
)
async def test_worker_leaves_to_the_chief(worker: Alone, fields: dict[str, Any]) -> None:
    assert await worker.ask(12, **fields) == []


@pytest.mark.parametrize("part", [-1, PARTS])
async def test_part_that_is_not_there_is_left_alone(part: int) -> None:
    assert await Alone().ask(part) == []


@pytest.mark.parametrize("event", ["a step begins", "it is over", "another one begins"])
async def test_worker_gives_up_what_is_not_wanted_any_more(event: str) -> None:
    worker = Alone()

    def happen() -> None:
        if event == "a step begins":
            worker.is_computing = True
        else:
            parts = (1,) if event == "another one begins" else ()
            name = "two" if parts else "one"
            request, again = cast(Request, worker), Evaluate(0, name, 8, data="", parts=parts)
            worker.evaluations.on_evaluate(request, again)

    worker.between = happen
    assert await worker.ask(12, 11) == []
