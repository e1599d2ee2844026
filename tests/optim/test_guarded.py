"""Guarded updates: their bits are those of others, and a killed process leaves memory whole."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zmqtrain.optim import (
    LAMB,
    SGD,
    Adafactor,
    Adam,
    Flat,
    Ftrl,
    Lion,
    Mean,
    Momentum,
    RMSProp,
    Update,
    new_slots,
)
from zmqtrain.optim.layers import factors_of
from zmqtrain.optim.redo import KERNEL_BLOCK, Redo
from zmqtrain.optim.runs import Run

COPY = 3 * KERNEL_BLOCK
NOTHING = 0  # PROT_NONE, for mprotect

UPDATES = [
    Update(SGD(0.1)),
    Update(SGD(0.1), l2=0.1, moving_average=0.9),
    Update(Momentum(0.1, nesterov=True), moving_average=0.9),
    Update(RMSProp(0.1, momentum=0.5, centered=True)),
    Update(RMSProp(0.1, rho=0.5, centered=True), moving_average=0.9),
    Update(Adam(0.1), l2=0.1),
    Update(Ftrl(0.1, l1=0.4)),
    Update(Ftrl(0.1, learning_rate_power=-0.3), moving_average=0.9),  # has no kernel
    Update(Update(Adam(0.1), moving_average=0.9), l2=0.1),
    Update(Lion(0.1), moving_average=0.9),
    Update(LAMB(0.1), l2=0.1),
    Update(Adafactor(0.1), moving_average=0.9),
]

every_update = pytest.mark.parametrize("update", UPDATES, ids=lambda update: repr(update)[:70])


class Memory:
    """Parameters, slots and a gradient of their own for every worker; copies beside them."""

    def __init__(
        self, update: Update, size: int, copy: int = COPY, make: Callable[..., Any] = np.array
    ) -> None:
        """``make``: returns a copy of an array."""
        self.parameters: Flat = make(normal(size, 99))
        self.slots = {n: make(slot) for n, slot in new_slots(update, self.parameters).items()}
        arrays = [self.parameters, *self.slots.values()]
        copies = [make(np.full(copy, np.nan, np.float32)) for _ in arrays]
        self.redo = Redo(arrays, copies, make(np.zeros(2, np.int64)))

    @property
    def bits(self) -> list[bytes]:
        return [array.tobytes() for array in self.redo.arrays]


def normal(size: int, seed: int) -> Flat:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


@every_update
@pytest.mark.parametrize("fused", [True, False])
def test_guarded_update_gives_the_bits_of_an_unguarded_one(update: Update, fused: bool) -> None:
    sizes = 0, 1, KERNEL_BLOCK - 1, KERNEL_BLOCK + 1, 2 * COPY + 77
    for size, (gradients, count) in product(sizes, [(1, 1), (3, 4)]):
        check_guarded(update, size, gradients, count, fused)


def check_guarded(update: Update, size: int, gradients: int, count: int, fused: bool) -> None:
    guarded, plain = Memory(update, size), Memory(update, size)
    bound = as_fused(update, fused).bind(guarded.parameters, guarded.slots, guarded.redo)
    reference = update.bind(plain.parameters, plain.slots)
    for step in range(2):
        pushed = [normal(size, 10 * step + number) for number in range(gradients)]
        guarded.redo.begin()
        bound.apply(Mean(pushed, count), step)
        reference.apply(Mean(pushed, count), step)
    assert guarded.bits == plain.bits
    assert guarded.redo.progress.tolist() == [size, size]


def as_fused(update: Update, fused: bool) -> Update:
    return Update(update.rule, update.l2, update.moving_average, fused=fused)


@every_update
@pytest.mark.parametrize("first", [True, False], ids=["kernel first", "NumPy first"])
def test_update_that_one_loop_left_is_finished_by_the_other(update: Update, first: bool) -> None:
    size, gradient = 2 * COPY + 77, normal(2 * COPY + 77, 1)
    memory, whole = Memory(update, size), Memory(update, size)
    reference = update.bind(whole.parameters, whole.slots)
    factors = None
    if update.is_layered:  # known before the first element was changed
        squares = reference.squares(Run(slice(0, size)), Mean([gradient]), 0)
        factors = factors_of([update.rule], [squares], [size], 0)
    reference.apply(Mean([gradient]), 0)
    part = slice(0, COPY)  # of it the process had done all, and had the next run ready in part
    slots = {name: slot[part] for name, slot in memory.slots.items()}
    left = Redo([a[part] for a in memory.redo.arrays], memory.redo.copies, memory.redo.progress)
    as_fused(update, first).bind(memory.parameters[part], slots, left).apply(
        Mean([gradient[part]]), 0, factors
    )
    for array, copy in zip(memory.redo.arrays, memory.redo.copies, strict=True):
        copy[:10] = array[COPY : COPY + 10]  # the old values, for which nothing has counted yet
    memory.redo.resume()
    second = as_fused(update, not first)
    bound = second.bind(memory.parameters, memory.slots, memory.redo)
    bound.apply(Mean([gradient]), 0, factors)
    assert memory.bits == whole.bits


@pytest.mark.parametrize("allowed", [NOTHING, mmap.PROT_READ], ids=["read", "written"])
@pytest.mark.parametrize("which", ["gradient", "arrays", "copies"])
def test_compiled_loop_killed_at_any_page_leaves_what_can_be_finished(
    which: str, allowed: int
) -> None:
    """It is killed as it first reads, or first writes, some page of some array."""
    update, size = Update(Momentum(0.1), moving_average=0.9), 2 * KERNEL_BLOCK + 77
    whole, gradient = Memory(update, size), normal(size, 1)
    update.bind(whole.parameters, whole.slots).apply(Mean([gradient]), 0)
    length = KERNEL_BLOCK if which == "copies" else size
    found = set()
    for place, page in product(range(3), range(-(-4 * length // mmap.PAGESIZE))):
        memory, given = Memory(update, size, KERNEL_BLOCK, shared), shared(gradient)
        arrays = {"gradient": [given] * 3, "arrays": memory.redo.arrays}
        array = arrays.get(which, memory.redo.copies)[place]
        bound = update.bind(memory.parameters, memory.slots, memory.redo)
        is_killed = child_is_killed(array, page, allowed, partial(bound.apply, Mean([given]), 0))
        assert is_killed is (which != "gradient" or allowed == NOTHING)
        found.add(tuple(memory.redo.progress.tolist()))
        memory.redo.resume()
        bound.apply(Mean([gradient]), 0)
        assert memory.bits == whole.bits, f"killed at page {page} of array {place}"
    ends = (0, KERNEL_BLOCK, 2 * KERNEL_BLOCK, size)
    if (which, allowed) == ("arrays", mmap.PROT_READ):  # killed as it copies what is ready
        assert found == {*pairwise(ends)}


def shared(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy in pages of its own, which a child process writes to as well."""
    copy = np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype)
    copy[:] = array
    return copy


def child_is_killed(array: Flat, page: int, allowed: int, work: Callable[[], None]) -> bool:
    """Do ``work`` in a child process, which dies when it does what is not allowed to this page."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        address = ctypes.c_void_p(array.ctypes.data + page * mmap.PAGESIZE)
        ctypes.CDLL(None).mprotect(address, mmap.PAGESIZE, allowed)
        work()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
