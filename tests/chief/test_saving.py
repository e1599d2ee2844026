"""The chief's checkpoints."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.clock import StopClock
from tests.plans import planned
from zmqtrain.chief import saving
from zmqtrain.chief.saving import Saver
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.data import NoisyLine
from zmqtrain.errors import CheckpointError, FencedError
from zmqtrain.models import LinearRegression
from zmqtrain.observe.metrics import Metrics
from zmqtrain.optim import SGD
from zmqtrain.planning.job_fingerprint import job_fingerprint
from zmqtrain.protocol.checkpoint import Saved
from zmqtrain.store import checkpoint
from zmqtrain.store.manifest import read_manifest, verify


async def write_shard(job: zmqtrain.Job, directory: Path) -> Saved:
    """Write the one shard of a job; every save is of a later step."""
    (layout,) = planned(job).layouts
    flat = layout.flat_of(job.initial_values())
    step = next(STEPS)
    file, tensors = checkpoint.shard_file(directory, 0), checkpoint.tensors_of(layout, flat, {}, {})
    written = checkpoint.seal_shard(checkpoint.copy_tensors(file, tensors), 0, step)
    return Saved(step, job.policy, Ledger().state(), (written,))


STEPS = count(10)


def make_job(model: Any = None, **fields: Any) -> zmqtrain.Job:
    model = model or LinearRegression()
    return zmqtrain.Job(model=model, data=NoisyLine(), optimizer=SGD(), **fields)


def saver_of(job: zmqtrain.Job, write: Any = None) -> Saver:
    write, layouts = write or partial(write_shard, job), planned(job).layouts
    return Saver(job, layouts, job_fingerprint(job), Metrics("chief"), write)


@pytest.mark.parametrize(
    "error", [CheckpointError("no room"), FencedError("a new life"), asyncio.CancelledError()]
)
async def test_save_that_comes_to_nothing_leaves_no_directory(
    tmp_path: Path, error: BaseException
) -> None:
    directories = []

    async def fail(directory: Path) -> Saved:
        (directory / "shard-00000.safetensors").touch()
        directories.append(directory)
        raise error

    saver = saver_of(make_job(logdir=str(tmp_path)), fail)
    with pytest.raises(type(error)):
        await saver.save(step=10, generation=1)
    (directory,) = directories
    assert not directory.exists()


async def test_step_that_is_saved_is_not_due_again_while_a_job_stands_still(
    tmp_path: Path, stop_clock: StopClock
) -> None:
    clock = stop_clock(saving)
    saver = saver_of(make_job(logdir=str(tmp_path), save_secs=3))
    assert not saver.is_due(0)
    clock.now = 3.0
    assert saver.is_due(0)  # nothing was saved yet
    await saver.save(0, generation=1)
    step = saver.last_step
    clock.now = 6.0
    assert not saver.is_due(step)
    assert not saver.is_due(step + 1)  # the last one counts as of now
    clock.now = 9.0
    assert saver.is_due(step + 1)


async def test_checkpoint_is_due_where_a_multiple_of_the_steps_was_passed(tmp_path: Path) -> None:
    fields = {"logdir": str(tmp_path), "save_steps": 10, "save_secs": 0}
    job = make_job(**fields)
    saver = saver_of(job)
    assert [step for step in (0, 9, 10, 12) if saver.is_due(step)] == [10, 12]
    await saver.save(12, generation=1)  # the checkpoint says which step it is of
    assert [step for step in (12, 19, 20, 35) if saver.is_due(step)] == [20, 35]
    resumed = saver_of(job)
    await resumed.newest()
    restored = read_manifest(Path(saver.last or "")).global_step
    following = restored - restored % 10 + 10
    assert not resumed.is_due(following - 1) and resumed.is_due(following)
    assert not saver_of(job.model_copy(update={"logdir": None})).is_due(10)


@pytest.mark.parametrize("given", ["hogwild", "local-steps:2"])
@pytest.mark.parametrize("then", ["hogwild", "bounded-staleness:4"])
async def test_policy_that_was_changed_before_the_checkpoint_is_named(
    then: str, given: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(logdir=str(tmp_path), policy="hogwild")

    async def write(directory: Path) -> Saved:
        return replace(await write_shard(job, directory), policy=then)

    await saver_of(job, write).save(10, generation=1)
    await saver_of(job.with_overrides(policy=given)).newest()
    is_named = f"when the checkpoint was saved it was {then}" in caplog.text
    assert is_named == (then != "hogwild")


async def test_checkpoint_without_shared_logdir_is_not_reported_as_saved(tmp_path: Path) -> None:
    job = make_job()
    saver = saver_of(job)
    async with saver.with_weights(job.initial_values(), generation=2) as path:
        assert path.exists()
    assert saver.last_step == 0


@pytest.mark.parametrize(("damaged", "is_later"), [("", True), ("shard", False)])
async def test_damaged_checkpoint_of_a_later_generation_does_not_begin(
    damaged: str, is_later: bool, tmp_path: Path
) -> None:
    job = make_job(logdir=str(tmp_path))
    saver = saver_of(job)
    await saver.save(step=10, generation=1)
    async with saver.with_weights(job.initial_values(), generation=2) as path:
        pass
    for file in path.glob(f"{damaged}*.safetensors") if damaged else ():
        file.write_bytes(bytes(file.stat().st_size))
    assert await saver.has_later(1) is is_later


async def test_damaged_file_of_frozen_variables_is_written_anew(tmp_path: Path) -> None:
    class Half(LinearRegression):
        def frozen(self, seed: int) -> dict[str, Any]:
            return {"scale": np.ones(3, np.float32)}

    saver = saver_of(make_job(Half(), logdir=str(tmp_path)))
    first = await saver.save(step=10, generation=1)
    assert first is not None
    file = first / "frozen.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    second = await saver.save(step=20, generation=1)
    assert second is not None
    verify(second, read_manifest(second))


@pytest.mark.parametrize(("save_secs", "logdir"), [(5.0, None), (5.0, "runs"), (None, None)])
def test_interval_without_a_logdir_is_told(
    save_secs: float | None, logdir: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    given = {} if save_secs is None else {"save_secs": save_secs}
    saver_of(make_job(logdir=logdir, **given))
    told = ["save_secs is 5, but the job has no logdir: it saves nothing; give --logdir"]
    assert [text.partition(" (or")[0] for text in caplog.messages] == (
        told if save_secs and not logdir else []
    )
