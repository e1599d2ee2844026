"""The model of CUDA is as unkind as it claims to be: each fault shows, in values and as a fault."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.cupy_stand_in import make
from zmqtrain.compute.arrays import zeros

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="maps pages as Linux does")

SIZE = 1 << 15
PAGE = mmap.PAGESIZE


@pytest.fixture
def cupy() -> Any:
    return make(1)


@pytest.fixture
def faults(cupy: Any) -> Iterator[list[str]]:
    found = cupy.host.model.faults
    yield found
    found.clear()
    cupy.host.model.close()


def register(cupy: Any, flat: Any) -> int:
    start: int = flat.ctypes.data // PAGE * PAGE
    cupy.cuda.runtime.hostRegister(
        start, -(-(flat.ctypes.data + flat.nbytes) // PAGE) * PAGE - start, 0
    )
    return start


def mapped(value: float) -> Any:
    flat = np.frombuffer(mmap.mmap(-1, 4 * SIZE), np.float32)
    flat[:] = value
    return flat


def test_copy_from_new_pages_at_registered_addresses_is_of_the_old_ones(
    cupy: Any, faults: list[str]
) -> None:
    first = mapped(1)
    address = register(cupy, first)
    del first
    second = mapped(2)
    assert second.ctypes.data == address  # Linux gives the same addresses again
    twin = cupy.zeros(SIZE, np.float32)
    twin.set(second)
    assert (twin.get() == 1).all()
    twin[...] = 3
    twin.get(out=second)
    assert (second == 2).all()
    assert not faults


@pytest.mark.parametrize("where", [slice(0, SIZE // 2), slice(5, 5 + SIZE)])
def test_copy_of_memory_that_is_registered_in_part_fails(
    where: slice, cupy: Any, faults: list[str]
) -> None:
    flat = zeros(2 * SIZE)
    register(cupy, flat[where])
    for part in (flat, flat[: SIZE + 2 * PAGE]):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            cupy.zeros(len(part), np.float32).set(part)


def test_memory_that_is_registered_twice_is_refused_and_a_fault(
    cupy: Any, faults: list[str]
) -> None:
    flat = zeros(2 * SIZE)
    start = register(cupy, flat[:SIZE])
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError) as caught:
        register(cupy, flat[SIZE - 10 :])
    assert caught.value.status == 712
    cupy.cuda.runtime.hostUnregister(start)
    register(cupy, flat[SIZE - 10 :])
    assert faults == ["memory is registered twice"]


Way = Callable[[Any, Any, Any, Any], None]


def no_wait_before_a_kernel(cupy: Any, copies: Any, flat: Any, twin: Any) -> None:
    twin.set(flat, stream=copies)
    twin += 1
    copies.synchronize()


def no_wait_after_a_kernel(cupy: Any, copies: Any, flat: Any, twin: Any) -> None:
    twin += 1
    twin.get(stream=copies, out=flat, blocking=False)
    copies.synchronize()


def wait_for_an_event_of_before(cupy: Any, copies: Any, flat: Any, twin: Any) -> None:
    copies.wait_event(cupy.cuda.get_current_stream().record())
    event = copies.record()
    twin.set(flat, stream=copies)
    cupy.cuda.get_current_stream().wait_event(event)
    twin += 1


def source_is_changed(cupy: Any, copies: Any, flat: Any, twin: Any) -> None:
    copies.wait_event(cupy.cuda.get_current_stream().record())
    twin.set(flat, stream=copies)
    flat[:] = 7
    copies.synchronize()


def source_is_changed_after_a_kernel(cupy: Any, copies: Any, flat: Any, twin: Any) -> None:
    compute = cupy.cuda.get_current_stream()
    copies.wait_event(compute.record())
    twin.set(flat, stream=copies)
    compute.wait_event(copies.record())
    twin += 1
    flat[:] = 7
    copies.synchronize()


def unregistered_in_flight(cupy: Any, copies: Any, flat: Any, twin: Any) -> None:
    start = register(cupy, flat)
    copies.wait_event(cupy.cuda.get_current_stream().record())
    twin.set(flat, stream=copies)
    cupy.cuda.runtime.hostUnregister(start)
    copies.synchronize()


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        (no_wait_before_a_kernel, "two streams"),
        (no_wait_after_a_kernel, "two streams"),
        (wait_for_an_event_of_before, "two streams"),
        (source_is_changed, "the source of a copy has changed"),
        (source_is_changed_after_a_kernel, "the source of a copy has changed"),
        (unregistered_in_flight, "unregistered while a copy is in flight"),
    ],
)
def test_missing_wait_is_a_fault(way: Way, fault: str, cupy: Any, faults: list[str]) -> None:
    flat, twin = zeros(SIZE), cupy.zeros(SIZE, np.float32)
    way(cupy, cupy.cuda.Stream(non_blocking=True), flat, twin)
    assert fault in faults[0]


def test_free_memory_is_given_to_others_while_a_copy_to_it_is_in_flight(
    cupy: Any, faults: list[str]
) -> None:
    flat, twin = zeros(SIZE), cupy.zeros(SIZE, np.float32)
    copies = cupy.cuda.Stream(non_blocking=True)
    copies.wait_event(cupy.cuda.get_current_stream().record())
    twin.set(flat, stream=copies)
    del twin
    cupy.zeros(SIZE, np.float32)
    assert "two streams" in faults[0]
