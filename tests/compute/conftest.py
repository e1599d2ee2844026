"""CuPy, for one contract suite: a stand-in, and the real one where there is a device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cupy_stand_in import installed
from tests.gpu_source import COMPILER
from zmqtrain.compute.device import Gpu


@pytest.fixture(params=["stand-in", pytest.param("device", marks=pytest.mark.gpu)])
def cupy(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "stand-in":
        if sys.platform != "linux" or COMPILER is None:
            pytest.skip("the stand-in needs Linux and a compiler of C++")
        with installed(3) as module:
            yield module
        return
    module = pytest.importorskip("cupy")
    if not module.is_available():
        pytest.skip("no CUDA device")
    yield module


@pytest.fixture
def gpu(cupy: Any) -> Gpu:
    return Gpu("--device")
