"""`zmqtrain.attach`: a loop of the user's own, alone in its process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.events import events_in
from zmqtrain import Job
from zmqtrain.callbacks import LambdaCallback, TensorBoard
from zmqtrain.config.cluster import Role
from zmqtrain.data import Arrays
from zmqtrain.errors import ConfigError, ExitCode, RunFailedError
from zmqtrain.local.own_loop import Session
from zmqtrain.models import LinearRegression
from zmqtrain.observe.summary import parameters_sha256
from zmqtrain.optim import Adam
from zmqtrain.training.own_loop import LoopBridge, LoopEndedError

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
DATA = Arrays((X, X[:, :1]), (X, X[:, :1]))
STEPS = 20
ON_STEPS = LambdaCallback(on_steps=lambda step, logs: None)


class Regression(LinearRegression):
    """A model as an adapter makes it: a step begins with memory and ends with a loss."""

    @property
    def module(self) -> Regression:
        return self

    def begin(self, parameters: Any, batch: Any, out: Any) -> Any:
        return parameters, batch, out

    def finish(self, loss: Any) -> float:
        return float(loss)


def job(**fields: Any) -> Job:
    options = {"batch_size": 7, "steps": STEPS} | fields
    return Job(model=Regression(3), data=DATA, optimizer=Adam(0.1), **options)


def train(session: Session, until: Callable[[int], object] = lambda step: None) -> None:
    for batch in session.batches():
        until(session.steps)
        session.step(session.module.loss_and_gradients(*batch))


def cluster(job: Job, **size: int) -> Session:
    """Return the session of the only worker of a cluster in this process."""
    bridge = LoopBridge(job.model)
    own = job.model_copy(update={"model": bridge})
    return Session(own, bridge, lambda job, on_start: (0, zmqtrain.run(job, **size)))


@pytest.mark.parametrize("size", [{}, {"workers": 1, "ps": 2}, {"workers": 1, "ps": 0}], ids=str)
def test_loop_knows_its_place_and_measures_and_saves_in_every_kind_of_run(
    size: dict[str, int], tmp_path: Path
) -> None:
    seen: list[Any] = []
    noted = LambdaCallback(every_steps=STEPS, on_steps=lambda step, logs: seen.append(logs))
    own = job(logdir=str(tmp_path), callbacks=[noted], evaluate_every=5)
    errors, evaluations, saved = [], {}, []
    with cluster(own, **size) if size else zmqtrain.attach(own) as session:
        assert (session.worker, session.workers, session.global_step) == (0, 1, 0)
        for parameters, (x, y), out in session.batches():
            loss = session.module.loss_and_gradients(parameters, (x, y), out)
            errors.append(float(loss) ** 0.5)
            step = session.step(loss, root=errors[-1])
            assert step == session.steps == session.global_step
            if step % 5 == 0:
                evaluations[step] = session.evaluate()
                saved.append(session.save())
    assert session.summary is not None
    assert [Path(path).name for path in saved[:-1]] == [f"step-{n:08d}" for n in (5, 10, 15)]
    assert saved[-1] is None and evaluations.pop(STEPS) == {}
    for row in session.summary.evaluations[: None if size else -1]:
        assert row["step"] == STEPS or row == {"step": row["step"]} | evaluations[row["step"]]
    assert seen == [
        {"loss": pytest.approx(np.mean(np.square(errors))), "root": pytest.approx(np.mean(errors))}
    ]
    assert session.summary.history.history["root"] == pytest.approx([np.mean(errors)])


@pytest.mark.parametrize(
    ("fields", "first", "then", "text"),
    [
        ({}, {"a": 1.0}, {}, r"got the measures \['a'\], which nothing takes.*JSONLogger"),
        ({"callbacks": [ON_STEPS]}, {"a": 1.0}, {"b": 1.0}, r"\['b'\]; expected \['a'\]"),
        ({"callbacks": [ON_STEPS]}, {"a": np.ones(2)}, {}, r"the measure 'a' .* has the shape"),
    ],
)
def test_measure_that_would_be_lost_is_refused(
    fields: Any, first: Any, then: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=text), zmqtrain.attach(job(**fields)) as session:
        for number, batch in enumerate(session.batches()):
            loss = session.module.loss_and_gradients(*batch)
            session.step(loss, **(then if number else first))


@pytest.mark.parametrize("size", [{}, {"workers": 1, "ps": 1}], ids=str)
def test_loop_logs_numbers_and_histograms_of_its_worker_by_global_step(
    size: dict[str, int], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("tensorboardX")
    own = job(steps=3, callbacks=[TensorBoard(tmp_path)])
    with cluster(own, **size) if size else zmqtrain.attach(own) as session:
        for parameters, batch, out in session.batches():
            loss = session.module.loss_and_gradients(parameters, batch, out)
            session.log({"loss": torch.tensor(loss, requires_grad=True), "slope": out["weights"]})
            session.step(loss)
        session.log({"end": 1})
    found = [each for each in events_in(tmp_path) if each[0] == "worker-0"]
    assert [(tag, step) for _, step, tag, _ in found if tag != "slope"] == [
        *(("loss", step) for step in range(3)),
        ("end", 3),
    ]
    assert [step for _, step, tag, _ in found if tag == "slope"] == [0, 1, 2]


def test_log_without_a_board_is_refused() -> None:
    with zmqtrain.attach(job()) as session:
        with pytest.raises(ConfigError, match=r"expected a job with callbacks=\[TensorBoard"):
            session.log({"norm": 1.0})
        train(session)


def test_loop_without_a_logdir_or_an_evaluation_set_cannot_save_or_evaluate() -> None:
    bare = job().model_copy(update={"data": Arrays((X, X[:, :1]))})
    with zmqtrain.attach(bare) as session:
        with pytest.raises(ConfigError, match="no logdir to save in"):
            session.save()
        with pytest.raises(ConfigError, match="has no evaluation set"):
            session.evaluate()
        train(session)


def test_own_loop_ends_with_the_same_bits_as_any_other() -> None:
    with zmqtrain.attach(job()) as session:
        train(session)
    expected = zmqtrain.run(job())
    assert session.steps == STEPS
    assert session.summary is not None
    assert session.summary.parameters_sha256 == expected.parameters_sha256
    assert (session.summary.loss, session.summary.exit_code) == (expected.loss, 0)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, StopAsyncIteration])
def test_loop_that_raises_saves_its_steps_and_goes_on_later(
    error: type[BaseException], tmp_path: Path
) -> None:
    def fail(step: int) -> None:
        if step == STEPS // 2:
            raise error

    with pytest.raises(error), zmqtrain.attach(job(logdir=str(tmp_path))) as session:
        train(session, fail)
    assert session.summary is not None
    assert session.summary.global_step == STEPS // 2
    with zmqtrain.attach(job(logdir=str(tmp_path))) as session:
        train(session)
    assert session.summary is not None
    assert session.steps == STEPS - STEPS // 2
    assert session.summary.parameters_sha256 == zmqtrain.run(job()).parameters_sha256


@pytest.mark.parametrize("is_stepped", [True, False])
def test_loop_may_be_left_early_and_counts_what_was_stepped(is_stepped: bool) -> None:
    with zmqtrain.attach(job()) as session:
        for batch in session.batches():
            if is_stepped or session.steps < 4:
                session.step(session.module.loss_and_gradients(*batch))
            if (session.steps == 4 and is_stepped) or not session.steps < 4:
                break
    assert session.summary is not None
    assert session.summary.global_step == session.steps == 4


@pytest.mark.parametrize(
    ("length", "end"), [({"steps": STEPS}, f"step {STEPS}"), ({"epochs": 9}, "epoch 9")]
)
def test_loop_that_a_worker_leaves_early_is_named(
    length: dict[str, int], end: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train_until_the_loop_ends(own: Job, on_start: object) -> tuple[int, None]:
        with pytest.raises(LoopEndedError):
            zmqtrain.run(own, ps=1)
        return ExitCode.ORPHANED, None

    bridge = LoopBridge(Regression(3))
    own = Job(model=bridge, data=DATA, optimizer=Adam(0.1), batch_size=7, **length)
    session = Session(own, bridge, train_until_the_loop_ends)
    with pytest.raises(SystemExit) as ended, session:
        for batch in session.batches():
            session.step(session.module.loss_and_gradients(*batch))
            if session.steps == 4:
                break
    assert ended.value.code == ExitCode.ORPHANED
    assert f"its loop after 4 steps of this worker, before the end of the job ({end})" in (
        caplog.text
    )


@pytest.mark.parametrize("times", [0, 2])
def test_batch_that_is_not_stepped_once_is_refused(times: int) -> None:
    with pytest.raises(ConfigError), zmqtrain.attach(job()) as session:
        for batch in session.batches():
            loss = session.module.loss_and_gradients(*batch)
            for _ in range(times):
                session.step(loss)
    assert session.summary is not None
    assert session.summary.global_step == min(times, 1)


def test_run_that_fails_raises_and_has_a_summary() -> None:
    with pytest.raises(RunFailedError) as raised, zmqtrain.attach(job(max_nonfinite=1)) as session:
        for _ in session.batches():
            session.step(math.nan)
    assert session.summary is not None
    assert session.summary.exit_code == raised.value.exit_code == ExitCode.DIVERGED
    assert raised.value.summary is session.summary


def test_error_of_the_data_reaches_the_loop() -> None:
    data = Arrays((X, X[:, :1]), (X, X[:, :1]))
    broken = Job(model=Regression(3), data=data, optimizer=Adam(0.1), batch_size=1000)
    with pytest.raises(ConfigError, match="batch_size"), zmqtrain.attach(broken) as session:
        train(session)


def test_loop_of_a_chief_that_does_not_compute_ends_with_the_trained_module() -> None:
    torch = pytest.importorskip("torch")
    from zmqtrain.adapters.torch import TorchModel

    model, own = (
        TorchModel(lambda: torch.nn.Linear(3, 1), torch.nn.functional.mse_loss) for _ in range(2)
    )
    trained = zmqtrain.run(job().model_copy(update={"model": model}))
    session = Session(job(), LoopBridge(own), lambda *_: (0, trained), Role.CHIEF)
    with session:
        assert list(session.batches()) == []
    found = {name: value.numpy() for name, value in session.module.state_dict().items()}
    assert parameters_sha256(found) == trained.parameters_sha256


def test_script_of_a_ps_ends_when_its_job_does() -> None:
    session = Session(job(), LoopBridge(Regression(3)), lambda *_: (0, None), Role.PS)
    with pytest.raises(SystemExit) as ended, session:
        train(session)
    assert ended.value.code == ExitCode.OK


class Plain:
    """A model of three methods and no base class."""

    def __init__(self) -> None:
        line = LinearRegression(3)
        self.parameters, self.metrics = line.parameters, line.metrics
        self.loss_and_gradients = line.loss_and_gradients


def test_model_of_three_methods_is_trained_in_an_own_loop() -> None:
    options: dict[str, Any] = {
        "data": DATA,
        "optimizer": Adam(0.1),
        "steps": STEPS,
        "batch_size": 7,
    }
    model = Plain()
    with zmqtrain.attach(Job(model=model, **options)) as session:
        for batch in session.batches():
            session.step(model.loss_and_gradients(*batch))
    expected = zmqtrain.run(Job(model=LinearRegression(3), **options))
    assert session.summary is not None
    assert session.summary.parameters_sha256 == expected.parameters_sha256


def test_batches_end_at_once_when_the_job_has_ended() -> None:
    with zmqtrain.attach(job()) as session:
        train(session)
        assert list(session.batches()) == []


def test_batch_that_a_broken_loop_has_left_is_an_error() -> None:
    with zmqtrain.attach(job()) as session:
        next(iter(session.batches()))
        with pytest.raises(ConfigError, match="batch 0 was not stepped"):
            next(iter(session.batches()))


def test_session_that_has_not_begun_has_no_batches() -> None:
    with pytest.raises(ConfigError, match="with zmqtrain"):
        next(iter(zmqtrain.attach(job()).batches()))
