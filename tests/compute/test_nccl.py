"""Sums over GPUs by NCCL: the same tests for the stand-in and, on a machine with GPUs, for NCCL."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from tests.constants import Constants
from tests.cupy_stand_in import Communicator, installed
from zmqtrain.compute import nccl as module_of_nccl
from zmqtrain.compute.nccl import Nccl
from zmqtrain.errors import ConfigError


def arrays_on(cupy: Any, devices: int) -> list[list[Any]]:
    arrays = []
    for number in range(devices):
        with cupy.cuda.Device(number):
            arrays.append([cupy.zeros(3, np.float32)])
    return arrays


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_arrays_of_the_first_device_are_the_sums(devices: int, cupy: Any) -> None:
    nccl_of_cupy = importlib.import_module("cupy.cuda.nccl")
    if devices > cupy.cuda.runtime.getDeviceCount() or not nccl_of_cupy.available:
        pytest.skip("fewer GPUs, or no NCCL")
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


@pytest.mark.parametrize("when", ["at once", "later"])
def test_failure_of_a_sum_names_the_gpus_and_frees_the_communicators(when: str) -> None:
    before = Communicator.open
    with installed(2) as cupy:
        nccl, cupy.host.sums_fail = Nccl([0, 1]), when
        told = r"--exchange nccl failed on gpu:0, gpu:1: cudaError 700; .*--exchange auto"
        with pytest.raises(ConfigError, match=told):
            nccl.reduce(arrays_on(cupy, 2))
        nccl.close()
    assert Communicator.open == before


def test_sum_that_a_gpu_does_not_take_part_in_fails_at_the_deadline(constants: Constants) -> None:
    constants(module_of_nccl, DEADLINE_S=0.05)
    before = Communicator.open
    with installed(2) as cupy:
        nccl, arrays = Nccl([0, 1]), arrays_on(cupy, 2)
        cupy.host.missing_ranks = {1}
        with pytest.raises(ConfigError, match=r"gpu:0, gpu:1: the sum is not there after 0\.05 s"):
            nccl.reduce(arrays)
        nccl.close()
    assert Communicator.open == before


def test_error_that_nccl_notes_beside_a_sum_ends_the_wait_for_it() -> None:
    with installed(2) as cupy:
        nccl, arrays = Nccl([0, 1]), arrays_on(cupy, 2)
        cupy.host.missing_ranks, cupy.host.nccl_error = {0}, "NCCL_ERROR_REMOTE_ERROR"
        with pytest.raises(ConfigError, match="NCCL_ERROR_REMOTE_ERROR"):
            nccl.reduce(arrays)
