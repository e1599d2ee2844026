"""Copies between host and device have the right values, whatever memory they are of."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda_model import ILLEGAL_ADDRESS
from tests.cupy_stand_in import installed
from zmqtrain.compute import staging
from zmqtrain.compute.arrays import Flat, read_only, zeros
from zmqtrain.compute.device import Gpu
from zmqtrain.store.segment import Segment, reach
from zmqtrain.store.segment_layout import SegmentLayout

LARGE = 300_001
"""Elements: some pages, and more than one buffer of staging.py."""


def normal(size: int, seed: int) -> Flat:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def check_both_ways(gpu: Gpu, cupy: Any, source: Flat, target: Flat) -> None:
    there, back = gpu.twins([source, target])
    assert there.shape == source.shape
    for factor in (2, 3):
        gpu.load([source], [there])
        cupy.multiply(there, np.float32(factor), out=back)
        gpu.store([back], [target])
        np.testing.assert_array_equal(target, source * np.float32(factor))
    wait = gpu.begin_store([there], [target])
    wait()
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("size", [0, 1, 1000, LARGE])
@pytest.mark.parametrize("make", [zeros, lambda size: np.zeros(size, np.float32)])
def test_values_come_to_the_gpu_and_back(
    size: int, make: Callable[[int], Flat], gpu: Gpu, cupy: Any
) -> None:
    source = make(size)
    source[:] = normal(size, 1)
    check_both_ways(gpu, cupy, source, make(size))
    check_both_ways(gpu, cupy, read_only(source), make(size))


def test_values_come_from_a_read_only_mapping_of_a_segment(
    gpu: Gpu, cupy: Any, tmp_path: Path
) -> None:
    layout = SegmentLayout(LARGE, ())
    segment = Segment.create(layout, tmp_path / "a.segment")
    segment.parameters[:] = normal(LARGE, 1)
    gradient = segment.gradient(0)
    check_both_ways(gpu, cupy, reach(segment.name, layout).parameters, gradient)
    segment.remove()


def test_views_of_one_array_come_to_the_gpu_each_with_its_values(gpu: Gpu, cupy: Any) -> None:
    whole = zeros(LARGE)
    whole[:] = normal(LARGE, 1)
    for part in (slice(5, 1005), slice(0, LARGE), slice(LARGE - 70_000, LARGE)):
        check_both_ways(gpu, cupy, whole[part], zeros(LARGE)[part])


@pytest.mark.parametrize("make", [zeros, lambda size: np.zeros(size, np.float32)])
def test_array_at_the_addresses_of_a_freed_one_has_its_own_values(
    make: Callable[[int], Flat], gpu: Gpu, cupy: Any
) -> None:
    """The allocator gives addresses again: the same, or such as overlap in part."""
    for seed, size in enumerate([LARGE, LARGE, 2 * LARGE, LARGE + 5000, LARGE]):
        source, target = make(size), make(size)
        source[:] = normal(size, seed)
        check_both_ways(gpu, cupy, source, target)
        del source, target


def test_mapping_at_the_addresses_of_an_unmapped_one_has_its_own_values(
    gpu: Gpu, cupy: Any
) -> None:
    found = set()
    for seed, pages in enumerate([100, 100, 300, 150, 100, 50, 200, 100]):
        memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
        source = np.frombuffer(memory, np.float32)
        found.add(source.ctypes.data)
        source[:] = normal(len(source), seed)
        check_both_ways(gpu, cupy, source, zeros(len(source)))
        del source, memory
    assert len(found) < 8  # or the test shows nothing


def test_copies_and_computations_wait_for_each_other(gpu: Gpu, cupy: Any) -> None:
    """Each round reads what the last one wrote; a copy out of order gives another number."""
    flat = zeros(LARGE)
    flat[:] = 1
    (twin,) = gpu.twins([flat])
    for _ in range(5):
        gpu.load([flat], [twin])
        for _ in range(20):
            twin += np.float32(1)
        gpu.store([twin], [flat])
    assert (flat == 1 + 5 * 20).all()


def test_source_may_change_once_a_load_was_waited_for(gpu: Gpu, cupy: Any) -> None:
    for size in (100, LARGE):
        flat = zeros(size)
        (twin,) = gpu.twins([flat])
        for value in range(5):
            flat[:] = value
            gpu.load([flat], [twin])
            gpu.wait()
            flat[:] = -1
            assert (twin.get() == value).all()


def test_two_gpus_of_a_process_load_the_same_memory(cupy: Any) -> None:
    flat = zeros(LARGE)
    flat[:] = normal(LARGE, 1)
    gpus = [Gpu("--devices", 0), Gpu("--devices", 0)]
    twins = [gpu.twins([flat])[0] for gpu in gpus]
    for gpu, twin in zip(gpus, twins, strict=True):
        gpu.load([flat], [twin])
    for gpu, twin in zip(gpus, twins, strict=True):
        gpu.wait()
        np.testing.assert_array_equal(twin.get(), flat)


def test_batch_comes_to_the_gpu_as_it_is(gpu: Gpu, cupy: Any) -> None:
    features, labels = normal(12, 1).reshape(4, 3), np.arange(4)
    on_device = gpu.batch((features, labels))
    assert all(isinstance(array, cupy.ndarray) for array in on_device)
    for there, here in zip(on_device, (features, labels), strict=True):
        assert there.dtype == here.dtype
        np.testing.assert_array_equal(there.get(), here)


# What a device does seldom, the stand-in does when asked to.


@pytest.mark.parametrize("refused", ["registration", "pinned memory", "both"])
def test_values_are_right_where_cuda_pins_nothing(refused: str) -> None:
    with installed(1) as cupy:
        model = cupy.host.model
        model.refuses_registration = refused != "pinned memory"
        if refused != "registration":
            model.pinned_nbytes = 0
        gpu = Gpu("--device")
        for make in (zeros, np.zeros):
            source = np.asarray(make(LARGE), np.float32)
            source[:] = normal(LARGE, 1)
            check_both_ways(gpu, cupy, source, zeros(LARGE))


def test_values_are_right_where_cuda_registers_read_only_memory(tmp_path: Path) -> None:
    layout = SegmentLayout(LARGE, ())
    segment = Segment.create(layout, tmp_path / "a.segment")
    with installed(1) as cupy:
        cupy.host.model.registers_read_only = True
        segment.parameters[:] = normal(LARGE, 1)
        reached = reach(segment.name, layout)
        check_both_ways(Gpu("--device"), cupy, reached.parameters, zeros(LARGE))
        assert len(cupy.host.model.memory.found) == 1
    segment.remove()


@pytest.mark.parametrize("offset", [-1, 0, 5])
def test_values_are_right_where_other_code_has_registered_a_part(offset: int) -> None:
    with installed(1) as cupy:
        model = cupy.host.model
        model.foreign_is_there = True
        source, target = zeros(LARGE), zeros(LARGE)
        source[:] = normal(LARGE, 1)
        for flat in (source, target):
            start = flat.ctypes.data + offset * mmap.PAGESIZE
            model.memory.register(start, 3 * mmap.PAGESIZE, 0)
        check_both_ways(Gpu("--device"), cupy, source, target)


def test_copies_of_what_is_not_pinned_go_by_two_buffers_a_direction() -> None:
    size = 5 * staging.SIZE + 1
    with installed(1) as cupy:
        gpu, before = Gpu("--device"), cupy.host.model.pinned_nbytes
        source, target = normal(size, 1), np.zeros(size, np.float32)
        check_both_ways(gpu, cupy, source, target)
        assert before - cupy.host.model.pinned_nbytes == 2 * 2 * 4 * staging.SIZE


@pytest.mark.parametrize("make", [zeros, lambda size: np.zeros(size, np.float32)])
def test_error_of_the_gpu_that_comes_late_is_raised_by_the_copy(
    make: Callable[[int], Flat],
) -> None:
    with installed(1) as cupy:
        gpu, flat = Gpu("--device"), make(LARGE)
        (twin,) = gpu.twins([flat])
        gpu.load([flat], [twin])
        cupy.host.model.late_error = ILLEGAL_ADDRESS
        for _ in range(2):
            with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="700"):
                gpu.store([twin], [flat])
