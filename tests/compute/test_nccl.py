"""Sums over GPUs by NCCL: the same tests for the stand-in and, on a machine with GPUs, for NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.cupy_stand_in import Communicator, NcclError, installed
from zmqtrain.compute.nccl import Nccl
from zmqtrain.errors import ConfigError


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.gpu)])
def cupy(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "stand-in":
        with installed(3) as module:
            yield module
        return
    module = pytest.importorskip("cupy")
    nccl = pytest.importorskip("cupy.cuda.nccl")
    if not (module.is_available() and nccl.available):
        pytest.skip("no CUDA device, or no NCCL")
    yield module


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_arrays_of_the_first_device_are_the_sums(devices: int, cupy: Any) -> None:
    if devices > cupy.cuda.runtime.getDeviceCount():
        pytest.skip("fewer GPUs")
    random = np.random.default_rng(0)
    given = [[random.random(size, np.float32) for size in (1, 70_001)] for _ in range(devices)]
    nccl = Nccl(range(devices))
    try:
        arrays = []
        for number, own in enumerate(given):
            cupy.cuda.Device(number).use()
            arrays.append([cupy.asarray(array) for array in own])
        cupy.cuda.Device(0).use()
        for times in (1, 2):  # the sums are what the first device adds next
            nccl.reduce(arrays)
            for place, array in enumerate(arrays[0]):
                others = sum(own[place] for own in given[1:])
                np.testing.assert_allclose(array.get(), given[0][place] + times * others, 1e-5)
    finally:
        nccl.close()


def test_same_gpu_twice_is_refused(cupy: Any) -> None:
    with pytest.raises(ConfigError, match=r"gpu:0, gpu:0: .*expected different GPUs"):
        Nccl([0, 0])


def test_missing_nccl_is_refused_with_the_remedy() -> None:
    with installed(2, nccl=False), pytest.raises(ConfigError, match=r"needs NCCL.*install it"):
        Nccl([0, 1])


@pytest.mark.parametrize("broken", ["groupEnd", "synchronize"])
def test_failure_of_a_sum_names_the_gpus_and_frees_the_communicators(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Communicator.open
    with installed(2) as cupy:
        nccl = Nccl([0, 1])
        error = {"groupEnd": NcclError, "synchronize": cupy.cuda.runtime.CUDARuntimeError}[broken]
        at = cupy.cuda.nccl if broken == "groupEnd" else cupy.cuda.Stream

        def fail(*stream: Any) -> None:
            sound(*stream)
            Communicator.failed = True
            raise error("no more")

        sound = getattr(at, broken)
        monkeypatch.setattr(Communicator, "failed", False)
        monkeypatch.setattr(at, broken, fail)
        told = r"--exchange nccl failed on gpu:0, gpu:1: no more; .*--exchange auto"
        with pytest.raises(ConfigError, match=told):
            nccl.reduce([[cupy.zeros(3, np.float32)] for _ in range(2)])
        nccl.close()
    assert Communicator.open == before


def test_close_frees_all_communicators() -> None:
    before = Communicator.open
    with installed(2):
        nccl = Nccl([0, 1])
        assert Communicator.open == before + 2
        nccl.close()
    assert Communicator.open == before
