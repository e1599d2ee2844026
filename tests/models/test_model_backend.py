from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from zmqtrain.models import MLP, LinearRegression, SoftmaxRegression
from zmqtrain.models.backend import Scratch, array_module


def test_numpy_arrays_numbers_and_nothing_belong_to_numpy() -> None:
    assert array_module() is np
    assert array_module(np.zeros(2), 3.0, np.float32(1)) is np


def test_importing_the_models_does_not_import_cupy() -> None:
    check = "import sys, zmqtrain.models, zmqtrain.data; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_scratch_is_reused_for_the_same_request_only() -> None:
    scratch, like = Scratch(), np.zeros(1, np.float32)
    first = scratch.arrays(like, 3, (4, 5))
    assert [(a.shape, a.dtype) for a in first] == [((3, 4), np.float32), ((3, 5), np.float32)]
    assert scratch.arrays(like, 3, (4, 5)) is first
    assert scratch.arrays(like, 2, (4, 5))[0].shape == (2, 4)
    assert scratch.arrays(like.astype(np.float64), 2, (4, 5))[0].dtype == np.float64


@pytest.fixture
def cupy() -> Any:
    module = pytest.importorskip("cupy")
    try:
        devices = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError:
        devices = 0
    if devices == 0:
        pytest.skip("no CUDA device")
    return module


@pytest.mark.gpu
def test_any_cupy_array_belongs_to_cupy(cupy: Any) -> None:
    assert array_module(np.zeros(1), cupy.zeros(1)) is cupy


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model", [LinearRegression(4, 2), SoftmaxRegression(4, 3), MLP(4, (5, 6), 3)], ids=repr
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
