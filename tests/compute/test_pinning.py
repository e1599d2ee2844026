"""Memory is registered with CUDA for as long as it exists, and not a moment longer."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from zmqtrain.compute.arrays import PAGES_FROM_NBYTES, read_only, zeros
from zmqtrain.compute.pinning import Pinning
from zmqtrain.store.segment import Segment, reach
from zmqtrain.store.segment_layout import SegmentLayout

SIZE = PAGES_FROM_NBYTES // 4
PAGE = mmap.PAGESIZE


class CudaError(RuntimeError):
    """Error of a CUDA call."""


class Runtime:
    """Notes what is registered, and refuses what overlaps."""

    CUDARuntimeError = CudaError

    def __init__(self) -> None:
        self.ranges: dict[int, range] = {}
        self.flags: list[int] = []
        self.refused: Callable[[int], bool] = lambda flags: False
        self.unmapped: list[int] = []  # that were registered when they were no longer mapped

    def hostRegister(self, start: int, nbytes: int, flags: int) -> None:
        assert start % PAGE == nbytes % PAGE == 0
        assert are_mapped(range(start, start + nbytes))
        taken = [r for r in self.ranges.values() if start < r.stop and r.start < start + nbytes]
        if taken or self.refused(flags):
            raise CudaError("cudaErrorHostMemoryAlreadyRegistered")
        self.ranges[start] = range(start, start + nbytes)
        self.flags.append(flags)

    def hostUnregister(self, start: int) -> None:
        if not are_mapped(self.ranges.pop(start)):
            self.unmapped.append(start)


def are_mapped(pages: range) -> bool:
    """Say whether a process has all of these addresses mapped, in however many mappings."""
    at = pages.start
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= at < stop:
            at = stop
    return at >= pages.stop


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def pinning(runtime: Runtime) -> Pinning:
    return Pinning(SimpleNamespace(runtime=runtime, Device=nullcontext))


pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")

LAYOUT = SegmentLayout(SIZE + 3, ("momentum",))


def of_segment() -> Any:
    return Segment.private(LAYOUT).parameters


def gradient_of_segment() -> Any:
    return Segment.private(LAYOUT).gradient(0)


def large_view() -> Any:
    return zeros(1 << 24)[1 << 20 : 1 << 23][5:]


every_kind = pytest.mark.parametrize(
    "make", [lambda: zeros(SIZE), of_segment, gradient_of_segment, large_view]
)


@every_kind
def test_registration_ends_before_the_memory_is_unmapped(
    make: Callable[[], Any], pinning: Pinning, runtime: Runtime
) -> None:
    flat = make()
    assert pinning.pin(flat)
    assert pinning.is_pinned(flat)
    (pages,) = runtime.ranges.values()
    assert pages.start <= flat.ctypes.data < flat.ctypes.data + flat.nbytes <= pages.stop
    view = flat[7:].view(np.uint8)[8:]
    del flat
    gc.collect()
    assert list(runtime.ranges.values()) == [pages]
    assert pinning.is_pinned(view)
    del view
    gc.collect()
    assert not runtime.ranges
    assert not runtime.unmapped


def test_registration_ends_with_an_array_in_a_circle(pinning: Pinning, runtime: Runtime) -> None:
    class Holder:
        def __init__(self) -> None:
            self.flat, self.circle = large_view(), self
            assert pinning.pin(self.flat)

    Holder()
    gc.collect()
    assert not runtime.ranges
    assert not runtime.unmapped


def test_memory_is_registered_once_whoever_asks(pinning: Pinning, runtime: Runtime) -> None:
    flat = zeros(4 * SIZE)
    assert all(pinning.pin(each) for each in (flat, flat[:SIZE], read_only(flat), flat[SIZE:]))
    assert len(runtime.flags) == 1


@pytest.mark.parametrize(
    "flat",
    [zeros(SIZE - 1), np.zeros(0, np.float32), np.zeros(SIZE, np.float32)],
    ids=["shares pages", "empty", "frees its memory itself"],
)
def test_other_arrays_are_not_registered(flat: Any, pinning: Pinning, runtime: Runtime) -> None:
    assert not pinning.pin(flat)
    assert not runtime.flags


def test_pages_that_another_object_shares_are_not_registered(
    pinning: Pinning, runtime: Runtime
) -> None:
    whole = np.frombuffer(bytearray(4 * SIZE + 4), np.float32)
    pinning.pin(whole[1:])
    (pages,) = runtime.ranges.values()
    start = whole.ctypes.data
    assert start <= pages.start
    assert pages.stop <= start + whole.nbytes


def test_two_arrays_over_the_same_memory_are_registered_once(
    pinning: Pinning, runtime: Runtime
) -> None:
    memory = mmap.mmap(-1, 8 * SIZE)
    first, second = (np.frombuffer(memory, np.float32, SIZE, at) for at in (0, 2 * SIZE))
    assert pinning.pin(first)
    assert not pinning.pin(second)
    del first
    assert not runtime.ranges
    assert not pinning.is_pinned(second)  # its pages were those of the first


def test_memory_that_other_code_has_registered_is_left_to_it(
    pinning: Pinning, runtime: Runtime
) -> None:
    flat = zeros(SIZE)
    page = flat.ctypes.data // PAGE * PAGE
    runtime.ranges[page] = range(page, page + PAGE)
    assert not pinning.pin(flat)
    assert not pinning.pin(flat)
    del flat
    assert list(runtime.ranges) == [page]


@pytest.mark.parametrize("is_refused", [False, True])
def test_read_only_mapping_is_registered_as_such_if_cuda_can(
    is_refused: bool, pinning: Pinning, runtime: Runtime, tmp_path: Path
) -> None:
    segment = Segment.create(LAYOUT, tmp_path / "a.segment")
    reached = reach(segment.name, LAYOUT)
    runtime.refused = lambda flags: is_refused and bool(flags & 8)
    assert pinning.pin(reached.parameters) is not is_refused
    assert pinning.pin(segment.parameters)
    assert [flags & 8 for flags in runtime.flags] == [0] if is_refused else [8, 0]
    segment.remove()


def test_view_that_is_read_only_does_not_make_the_memory_so(
    pinning: Pinning, runtime: Runtime
) -> None:
    flat = zeros(SIZE)
    assert pinning.pin(read_only(flat))
    assert [flags & 8 for flags in runtime.flags] == [0]


def test_child_of_a_fork_ends_no_registration_of_its_parent(
    pinning: Pinning, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = zeros(SIZE)
    assert pinning.pin(flat)
    monkeypatch.setattr(os, "getpid", lambda: 0)
    del flat
    assert len(runtime.ranges) == 1


def test_registration_that_cuda_does_not_end_is_logged(
    pinning: Pinning, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    flat = zeros(SIZE)
    assert pinning.pin(flat)
    runtime.hostUnregister = Mock(side_effect=CudaError("the device is lost"))  # type: ignore[method-assign]
    del flat
    (message,) = caplog.messages
    assert message.endswith("stay registered with CUDA: the device is lost")
