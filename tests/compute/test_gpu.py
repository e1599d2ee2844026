"""Equal results on GPU and CPU: shards, models, whole runs, and rules with sums or powers.

Shards are compared bit for bit: a GPU's additions, products, quotients and roots are rounded as
IEEE 754 says, like the CPU's, and its kernels do them one by one (tests/optim/test_gpu_source.py).
Sums over many elements are not: each processor adds in its own order.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.optim.runs import Run
from tests.optim.test_kernels import LAYERED, UPDATES, named
from tests.plans import planned
from tests.store.test_arithmetic import make_shard, run
from zmqtrain import Job
from zmqtrain.compute.arrays import zeros
from zmqtrain.compute.device import Cpu, Gpu
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.data import Digits
from zmqtrain.errors import ConfigError
from zmqtrain.models import MLP, LinearRegression
from zmqtrain.models.backend import array_module
from zmqtrain.optim import Adafactor, Adam, Flat, Ftrl, Muon, Update
from zmqtrain.store.finite import all_finite
from zmqtrain.training.exchange import Membership
from zmqtrain.training.model_runner import ModelRunner


def normal(size: int, seed: int) -> Flat:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


# Rules


POWER = Update(Ftrl(0.1, learning_rate_power=-0.3), l2=0.1, moving_average=0.9)


@pytest.mark.parametrize("update", [*LAYERED, POWER], ids=named)
def test_update_with_sums_or_powers_on_the_gpu_agrees_with_the_cpu(
    update: Update, cupy: Any
) -> None:
    """To rounding: sums are added in another order, and powers are not rounded alike everywhere."""
    host = Run(update, 1000)
    parameters = cupy.asarray(host.parameters)
    slots = {name: cupy.asarray(slot) for name, slot in host.slots.items()}
    for step in range(3):
        update.update(parameters, cupy.asarray(host.gradient(step)), slots, step)
        host.step(step)
    np.testing.assert_allclose(parameters.get(), host.parameters, rtol=1e-5, atol=1e-6)


def test_look_for_non_finite_elements_on_the_gpu(cupy: Any) -> None:
    flat = cupy.asarray(normal(100_003, 1))
    assert all_finite(flat)
    flat *= np.float32(1e30)  # so that squares overflow
    assert all_finite(flat)
    flat[77_777] = np.inf
    assert not all_finite(flat)


# Shards


MATRICES = [Update(Adafactor(0.1, weight_decay=0.1), 0.1, 0.9), Update(Muon(0.1))]


@pytest.mark.parametrize("update", [*LAYERED, *MATRICES], ids=named)
def test_shard_on_the_gpu_with_norms_agrees_with_one_in_place(update: Update, gpu: Gpu) -> None:
    shape = (20, 5) if update in MATRICES else None
    on_gpu, in_place = make_shard(update, gpu, shape=shape), make_shard(update, shape=shape)
    for shard in (on_gpu, in_place):
        run(shard, [("apply", [0]), ("accumulate", [1]), ("reduce", [2, 0])])
    np.testing.assert_allclose(on_gpu.parameters, in_place.parameters, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update", UPDATES[::3], ids=named)
def test_shard_on_the_gpu_holds_the_bits_of_one_in_place(update: Update, gpu: Gpu) -> None:
    averaged = Update(update.rule, update.l2, moving_average=0.9)
    changes = [("apply", [0]), ("accumulate", [1]), ("reduce", [2, 0]), ("reduce", [0, 1, 2])]
    on_gpu, in_place = shards = make_shard(averaged, gpu), make_shard(averaged)
    for shard in shards:
        run(shard, changes)
    assert on_gpu.version == in_place.version
    np.testing.assert_array_equal(on_gpu.parameters, in_place.parameters)
    np.testing.assert_array_equal(
        on_gpu.segment.slots["average"], in_place.segment.slots["average"]
    )
    for name, slot in on_gpu.slots.items():
        np.testing.assert_array_equal(slot, in_place.slots[name])


def test_large_shard_on_the_gpu_has_what_its_memory_held_at_each_change(gpu: Gpu) -> None:
    """Its memory is pinned; a worker, or a restored checkpoint, writes to it after a change."""
    shards = [make_shard(Update(Adam(0.1)), device, size=20_000) for device in (gpu, None)]
    for shard in shards:
        shard.initialize(np.full(shard.layout.size, 2, np.float32))
        run(shard, [("accumulate", [0]), ("accumulate", [0]), ("reduce", [0, 1]), ("apply", [0])])
    np.testing.assert_array_equal(*(shard.parameters for shard in shards))


# Models


def test_any_cupy_array_belongs_to_cupy(cupy: Any) -> None:
    assert array_module(np.zeros(1), cupy.zeros(1)) is cupy


@pytest.mark.parametrize(
    "model", [LinearRegression(4, 2), MLP(4, (), 3), MLP(4, (5, 6), 3)], ids=repr
)
def test_step_and_metrics_on_the_gpu_agree_with_the_cpu(model: Any, cupy: Any) -> None:
    random = np.random.default_rng(0)
    parameters = model.parameters(1)
    features = random.normal(0, 1, (9, 4)).astype(np.float32)
    answers = features[:, :2] if isinstance(model, LinearRegression) else random.integers(0, 3, 9)
    out = {name: np.empty_like(value) for name, value in parameters.items()}
    loss = model.loss_and_gradients(parameters, (features, answers), out)
    device_parameters = {name: cupy.asarray(value) for name, value in parameters.items()}
    device_out = {name: cupy.full(value.shape, cupy.nan, "f4") for name, value in out.items()}
    device_batch = cupy.asarray(features), cupy.asarray(answers)
    assert model.loss_and_gradients(device_parameters, device_batch, device_out) == pytest.approx(
        loss, rel=1e-5
    )
    for name, gradient in out.items():
        np.testing.assert_allclose(device_out[name].get(), gradient, rtol=1e-4, atol=1e-5)
    assert model.metrics(device_parameters, device_batch) == pytest.approx(
        model.metrics(parameters, (features, answers)), rel=1e-5
    )


class Diverged(MLP):
    """Its loss is NaN, and nothing waits for a device to compute it."""

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        for name, gradient in out.items():
            gradient[...] = parameters[name]
        return math.nan


def test_parameters_may_change_after_a_step_that_was_not_finite(gpu: Gpu) -> None:
    of = job(model=Diverged(64, 400, 10))
    (layout,) = planned(of).layouts
    parameters, gradient = zeros(layout.size), zeros(layout.size)
    runner = ModelRunner(of, gpu, ThreadTeam(1), lambda names: None)
    runner.bind(Membership([layout], [parameters], [gradient], ()))
    for value in range(1, 6):  # in step 4, no check of the parameters waits for them
        parameters[:] = value
        runner.load_parameters()
        batch = runner.place((np.zeros((2, 64), np.float32), np.zeros(2, np.int64)))
        assert not runner.compute(batch, 0, 2).finite
        parameters[:] = -1
        assert (runner.gradients[0][:100].get() == value).all()


class Noting(MLP):
    """Notes what is in the host's memory when its computation is launched."""

    host: Any = None
    noted: Any = None

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        loss = super().loss_and_gradients(parameters, batch, out)
        Noting.noted = Noting.host.copy()
        return loss


def test_gradients_leave_the_gpu_while_the_model_computes_and_are_reported_complete(
    gpu: Gpu, cupy: Any
) -> None:
    of = job(model=Noting(64, (400, 30), 10), overlap=True)
    (layout,) = planned(of).layouts
    values = layout.flat_of(of.initial_values())
    gradients = {device: zeros(layout.size) for device in (Cpu(), gpu)}
    reported: list[str] = []
    at_report = zeros(layout.size)

    def report(names: Sequence[str]) -> None:
        reported.extend(names)
        for cut in layout.slices:
            if cut.variable.name in names:
                cut.run(at_report)[:] = cut.run(Noting.host)

    runners = []
    for device, gradient in gradients.items():
        runners.append(ModelRunner(of, device, ThreadTeam(1), report))
        runners[-1].bind(Membership([layout], [values], [gradient], ()))
    random = np.random.default_rng(1)
    for step in range(3):
        batch = random.random((9, 64), np.float32), random.integers(0, 10, 9)
        for runner, gradient in zip(runners, gradients.values(), strict=True):
            Noting.host = gradient
            runner.load_parameters()
            assert runner.compute(runner.place(batch), step, 9).finite
            np.testing.assert_array_equal(at_report, gradient)
        np.testing.assert_allclose(*gradients.values(), 1e-3, 1e-5)
        assert reported[: len(reported) // 2] == reported[len(reported) // 2 :]
        assert reported[0].startswith("layer2")
        if hasattr(cupy, "host"):  # the stand-in, whose copies are seen to be under way
            assert np.isnan(Noting.noted[layout.owned_trained]).mean() > 0.9
        reported.clear()


# Whole runs


def job(**fields: Any) -> Job:
    fields = {"moving_average": 0.9, "policy": "sync-replicas", "steps": 30} | fields
    fields.setdefault("model", MLP(features=64, hidden=8, classes=10))
    return Job(data=Digits(), optimizer=Adam(0.01), batch_size=20, **fields)


@pytest.mark.parametrize("ps", [1, 2])
def test_run_with_its_shards_on_the_gpu_gives_the_parameters_of_one_on_the_cpu(
    ps: int, gpu: Gpu, cupy: Any
) -> None:
    on_cpu = zmqtrain.run(job(), workers=2, ps=ps)
    assert not hasattr(cupy, "host") or not cupy.host.allocations
    on_gpu = zmqtrain.run(job(ps_device="gpu"), workers=2, ps=ps)
    assert not hasattr(cupy, "host") or cupy.host.model.defaults[0].number > 30 * ps
    assert on_gpu.parameters_sha256 == on_cpu.parameters_sha256
    assert on_gpu.accuracy == on_cpu.accuracy


@pytest.mark.parametrize(
    "own", [{}, {"ps_device": "gpu"}, {"overlap": True, "model": MLP(64, 400, 10)}], ids=str
)
def test_run_with_workers_on_the_gpu_learns_what_one_on_the_cpu_learns(
    own: dict[str, Any], gpu: Gpu
) -> None:
    fields: dict[str, Any] = {"steps": 40} | ({} if "overlap" in own else {"clip_norm": 1.0})
    model = own.get("model", MLP(64, 8, 10))
    on_cpu = zmqtrain.run(job(**fields, model=model), workers=2, ps=2)
    on_gpu = zmqtrain.run(job(**fields | own, device="gpu"), workers=2, ps=2)
    assert on_gpu.accuracy == pytest.approx(on_cpu.accuracy, abs=0.03)


def test_checkpoint_of_a_run_on_the_gpu_goes_on_on_the_cpu(gpu: Gpu, tmp_path: Path) -> None:
    whole = zmqtrain.run(job(steps=40))
    zmqtrain.run(job(steps=20, logdir=str(tmp_path), ps_device="gpu"))
    rest = zmqtrain.run(job(steps=40, logdir=str(tmp_path)))
    assert rest.parameters_sha256 == whole.parameters_sha256


def test_tower_on_the_gpu_computes_what_a_worker_there_does(gpu: Gpu) -> None:
    worker, tower = job(device="gpu"), job(devices=("gpu:0",))
    assert zmqtrain.run(tower).parameters_sha256 == zmqtrain.run(worker).parameters_sha256


def test_towers_on_gpu_and_cpu_learn_together(gpu: Gpu) -> None:
    both, cpus = ({"devices": names, "steps": 40} for names in ("gpu:0,cpu:0", "cpu:0,cpu:1"))
    expected = zmqtrain.run(job(**cpus)).accuracy
    assert zmqtrain.run(job(**both)).accuracy == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("devices", [2, 3])
def test_sums_by_nccl_train_like_sums_on_the_host(devices: int, gpu: Gpu, cupy: Any) -> None:
    nccl = importlib.import_module("cupy.cuda.nccl")
    if cupy.cuda.runtime.getDeviceCount() < devices or not nccl.available:
        pytest.skip("fewer GPUs, or no NCCL")
    names = ",".join(f"gpu:{number}" for number in range(devices))
    by_nccl = zmqtrain.run(job(devices=names, exchange="nccl", clip_norm=0.1))
    on_host = zmqtrain.run(job(devices=names, clip_norm=0.1))
    assert (by_nccl.exchange, on_host.exchange) == ("nccl", "local")
    if devices == 2:  # a sum of two has one order
        assert by_nccl.parameters_sha256 == on_host.parameters_sha256
    for name, value in on_host.parameters.items():
        np.testing.assert_allclose(by_nccl.parameters[name], value, 1e-3, 1e-4)


def test_missing_gpu_is_refused_with_the_list_of_gpus(gpu: Gpu) -> None:
    with pytest.raises(ConfigError, match="gpu:999, but there are gpu:0"):
        zmqtrain.run(job(devices=("gpu:0", "gpu:999")))
