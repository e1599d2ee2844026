"""Models, data and schedules that fail while the job runs, in one process.

The error names the object, the place in the user's file and what to do; what was learned is saved.
"""

from __future__ import annotations

import os
import re
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.bad_input.parts import Spoilt, make_job
from tests.endings import bad_end
from zmqtrain import Summary
from zmqtrain.data import Arrays, NoisyLine
from zmqtrain.errors import CheckpointError, ConfigError, DataError, ExitCode
from zmqtrain.metrics import ConfusionMatrix
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.protocol.status import Status
from zmqtrain.store.logdir import checkpoints
from zmqtrain.training.model_runner import ModelRunner
from zmqtrain.user_code import is_installed

PLACE = rf"{re.escape(__file__)}, line \d+"
CALL = r"loss_and_gradients\(\) of Spoilt\(\)"
SHAPES = r"The batch is 0 \[20, 1\], 1 \[20, 1\]; parameters are weights \[1, 1\], bias \[1\]"


def other_shape(loss: float, parameters: Any, batch: Any, out: Any) -> float:
    out["weights"] = np.zeros((3, 3), np.float32)
    return loss


def does_not_fit(loss: float, parameters: Any, batch: Any, out: Any) -> float:
    out["weights"][...] = np.zeros((3, 3))
    return loss


def misspelt(loss: float, parameters: Any, batch: Any, out: Any) -> float:
    out["weigths"] = out["weights"]
    return loss


def removes(loss: float, parameters: Any, batch: Any, out: Any) -> float:
    del out["bias"]
    return loss


def returns_nothing(loss: float, parameters: Any, batch: Any, out: Any) -> None:
    return None


def raises(loss: float, parameters: Any, batch: Any, out: Any) -> float:
    raise RuntimeError("no luck")


def calls_a_library(loss: float, parameters: Any, batch: Any, out: Any) -> float:
    return float(np.linalg.inv(np.zeros((2, 2)))[0, 0])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (other_shape, r"'weights' from Spoilt\(\) .*\(3, 3\); expected \(1, 1\)"),
        (does_not_fit, rf"{CALL} failed: {PLACE}: ValueError: .*\. {SHAPES}"),
        (misspelt, r"'weigths', which is not a parameter; expected weights, bias"),
        (removes, r"'bias' from Spoilt\(\) is a NoneType; expected \(1,\)"),
        (returns_nothing, rf"{CALL} returned None; expected a number"),
        (raises, rf"{CALL} failed: {PLACE}: RuntimeError: no luck\. {SHAPES}"),
        (calls_a_library, rf"{CALL} failed: {PLACE}: LinAlgError: .*\. {SHAPES}"),
    ],
)
def test_model_that_gives_no_gradients_is_named_with_the_line(
    spoil: Callable[..., Any], text: str
) -> None:
    job = make_job(model=Spoilt("loss_and_gradients", spoil))
    with pytest.raises(ConfigError, match=text) as raised:
        zmqtrain.run(job, workers=2)
    assert raised.value.exit_code == ExitCode.USAGE


def set_to(value: float) -> Callable[..., float]:
    def spoil(loss: float, parameters: Any, batch: Any, out: Any) -> float:
        out["weights"][...] = value
        return loss

    return spoil


@pytest.mark.parametrize(
    ("spoil", "policy", "ps"),
    [
        (set_to(np.nan), "hogwild", 1),
        (set_to(np.nan), "sync-replicas", 2),
        (set_to(np.inf), "hogwild", 2),
        (lambda loss, *_: float("nan"), "hogwild", 2),
        (lambda loss, *_: float("-inf"), "sync-replicas", 2),
    ],
)
def test_non_finite_gradients_are_refused_until_the_job_stops_and_saves(
    spoil: Callable[..., float],
    policy: str,
    ps: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Spoilt("loss_and_gradients", spoil)
    job = make_job(model=model, policy=policy, max_nonfinite=3, logdir=str(tmp_path))
    summary = bad_end(job, workers=2, ps=ps)
    assert summary.exit_code == ExitCode.DIVERGED
    refused = summary.pushes["refused"]
    # A shard reports pushes together, so the fourth and the fifth may be decided on at once.
    assert refused in (4, 5)
    assert summary.ended.startswith(f"{refused} gradients held NaN or infinity")
    assert summary.global_step == 0
    assert summary.checkpoint is not None
    assert [str(path) for path in checkpoints(tmp_path)] == [summary.checkpoint]
    # One worker may have pushed all of them before the other one began.
    told = r"the gradient of batch \d was refused: the loss or the gradient is NaN or infinite"
    assert re.search(told, caplog.text)


@dataclass(frozen=True)
class NanAt:
    """A sound schedule until ``step``."""

    step: int

    def __call__(self, step: int) -> float:
        return 0.1 if step < self.step else float("nan")


@pytest.mark.parametrize(("policy", "ps"), [("hogwild", 2), ("sync-replicas", 1)])
def test_schedule_that_gives_no_rate_ends_the_job_with_what_it_learned(
    policy: str, ps: int, tmp_path: Path
) -> None:
    fields = {"policy": policy, "logdir": str(tmp_path), "partition_nbytes": 4}
    summary = bad_end(make_job(optimizer=SGD(NanAt(20)), **fields), workers=2, ps=ps)
    assert summary.exit_code == ExitCode.USAGE
    assert summary.ended == (
        "the learning rate is nan at step 20; expected a finite number of at least 0; correct "
        "NanAt(step=20) in the job"
    )
    resumed = zmqtrain.run(make_job(**fields, steps=40), workers=2, ps=ps)
    assert (resumed.exit_code, resumed.global_step) == (0, 40)
    assert resumed.pushes["applied"] == 20 * (1 if policy == "hogwild" else 2)


def test_measures_that_raise_do_not_keep_the_job_from_being_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = count()
    model = Spoilt("metrics", lambda sound, *_: 1 / 0 if next(calls) else sound)
    fields = {"model": model, "evaluate_every": 10, "logdir": str(tmp_path)}
    summary = bad_end(make_job(**fields))
    error = f"metrics() of Spoilt() failed: {__file__}, line "
    assert summary.exit_code == ExitCode.USAGE
    assert summary.ended.startswith(f"step 200 of 200 is done, but {error}")
    assert summary.global_step == 200
    assert [str(path) for path in checkpoints(tmp_path)] == [summary.checkpoint]
    assert any(f"not evaluated: {error}" in message for message in caplog.messages)


def test_model_for_batches_of_one_size_is_evaluated_with_these_alone() -> None:
    evaluated = SETS[1].take(np.arange(40))
    sizes = []

    def note(sound: Any, parameters: Any, batch: Any) -> Any:
        sizes.append(len(batch[0]))
        return sound

    data = Arrays(SETS[0].take(np.arange(100)), evaluated)
    zmqtrain.run(make_job(model=Spoilt("metrics", note), data=data, batch_size=40, steps=3))
    assert set(sizes) == {40}


@pytest.mark.parametrize("returned", [None, [("loss", 1.0)], {"loss": None}, {"loss": "low"}])
def test_measures_that_are_no_numbers_are_refused_before_training(returned: Any) -> None:
    model = Spoilt("metrics", lambda sound, *_: returned)
    with pytest.raises(ConfigError) as refused:
        zmqtrain.run(make_job(model=model))
    assert str(refused.value) == (
        f"metrics() of Spoilt() returned {returned!r}; expected a dict of names and numbers, such "
        'as {"loss": 0.25}'
    )


@pytest.mark.parametrize("how", [{}, {"workers": 2}, {"workers": 2, "ps": 0}])
def test_metric_that_does_not_fit_is_refused_at_the_start(
    how: dict[str, int], tmp_path: Path
) -> None:
    fields = {"metrics": [ConfusionMatrix(3)], "logdir": str(tmp_path)}
    job = make_job(model=LinearRegression(), **fields)
    with pytest.raises(ConfigError, match=r"^ConfusionMatrix\(.*expected"):
        zmqtrain.run(job, **how)
    assert checkpoints(tmp_path) == []


@dataclass(frozen=True)
class Shaky:
    """A training set that fails at example 7, or in some other way."""

    fails: Callable[[], Any]

    def __len__(self) -> int:
        return 50

    def take(self, indices: Any) -> Any:
        if 7 in indices:
            return self.fails()
        return NoisyLine().load(None)[0].take(indices)


@dataclass(frozen=True)
class ShakyData:
    loads: Callable[[], Any]

    def load(self, directory: str | None) -> Any:
        return self.loads()

    def __repr__(self) -> str:
        return "ShakyData()"


def bad_sector() -> Any:
    raise OSError("bad sector")


SETS = NoisyLine().load(None)


@pytest.mark.parametrize(
    ("loads", "text"),
    [
        (bad_sector, rf"^load\(\) of ShakyData\(\) failed: {PLACE}: OSError: bad sector"),
        (lambda: SETS[0], r"^load\(\) of ShakyData\(\) returned an? ArrayDataset; expected"),
        (lambda: (SETS[0], 3), r"^load\(\) of ShakyData\(\) returned a tuple of .'ArrayDataset"),
        (
            lambda: (Shaky(bad_sector), SETS[1]),
            rf"^take\(\) of ShakyData\(\) failed: {PLACE}: OSError: bad sector\. .*batch \d+$",
        ),
        (
            lambda: (Shaky(lambda: None), SETS[1]),
            r"^take\(\) of ShakyData\(\) returned None; expected a tuple of arrays",
        ),
        (lambda: (Shaky(tuple), SETS[1]), r"^take\(\) of ShakyData\(\) returned \(\); "),
    ],
)
def test_data_that_fails_is_named_with_the_line(loads: Callable[[], Any], text: str) -> None:
    with pytest.raises(DataError, match=text) as raised:
        zmqtrain.run(make_job(data=ShakyData(loads)), workers=2)
    assert raised.value.exit_code == ExitCode.DATA


def fit(job: zmqtrain.Job) -> None:
    zmqtrain.Trainer(job.model, job.optimizer).fit(job.data)


def attach(job: zmqtrain.Job) -> None:
    with zmqtrain.attach(job) as session:
        for batch in session.batches():
            session.step(job.model.loss_and_gradients(*batch))


@pytest.mark.parametrize(
    "train", [zmqtrain.run, lambda job: zmqtrain.run(job, workers=2), fit, attach]
)
def test_traceback_of_a_mistake_has_the_users_lines_and_few_others(
    train: Callable[[zmqtrain.Job], object],
) -> None:
    data = ShakyData(lambda: (Shaky(bad_sector), SETS[1]))
    with pytest.raises(DataError) as raised:
        train(make_job(data=data, model=LinearRegression()))
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert frames[0].filename == __file__
    assert sum(is_installed(frame.filename) for frame in frames) <= 2
    cause = raised.value.__cause__
    assert isinstance(cause, OSError)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == [
        "take",
        "bad_sector",
    ]


def test_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(self: Any) -> Any:
        raise AttributeError("a bug")

    monkeypatch.setattr(ModelRunner, "load_parameters", buggy)
    with pytest.raises(AttributeError, match="a bug"):
        zmqtrain.run(make_job())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A logdir with checkpoints at steps 40 and 80."""
    for steps in (40, 80):
        zmqtrain.run(make_job(steps=steps, logdir=str(tmp_path)))
    return tmp_path


def run_on(logdir: Path, **fields: Any) -> Summary:
    return zmqtrain.run(make_job(steps=100, logdir=str(logdir), **fields))


def test_logdir_that_cannot_be_written_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    logdir = tmp_path / "logdir"
    logdir.mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match=r"Permission denied.* with --logdir$"):
        run_on(logdir)


def test_logdir_lost_during_a_run_is_reported_with_the_result(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"

    def lose(status: Status) -> None:
        if root.is_dir():
            shutil.rmtree(root)
            root.touch()

    summary = bad_end(make_job(logdir=str(tmp_path)), on_progress=lose)
    assert (summary.exit_code, summary.checkpoint) == (ExitCode.CHECKPOINT, None)
    assert re.match(rf"step 200 of 200 is done, but {root}/\S+: cannot be written: ", summary.ended)
    assert summary.global_step == 200
    assert summary.loss < 0.1
