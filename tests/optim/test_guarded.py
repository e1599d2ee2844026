"""Guarded updates: their bits are those of others, and a killed process leaves memory whole."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kills import dying_at
from zmqtrain.optim import (
    LAMB,
    SGD,
    Adafactor,
    Adam,
    Flat,
    Ftrl,
    Lion,
    Momentum,
    RMSProp,
    Update,
    new_slots,
)
from zmqtrain.optim.kernels import cpu, loops
from zmqtrain.optim.pipeline import factors_of
from zmqtrain.optim.redo import DONE, KERNEL_BLOCK, READY, Redo

COPY = 3 * KERNEL_BLOCK
LOOPS = (loops.__file__,)

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

    def __init__(self, update: Update, size: int, copy: int = COPY) -> None:
        self.parameters = normal(size, 99)
        self.slots = new_slots(update, self.parameters)
        arrays = [self.parameters, *self.slots.values()]
        copies = [np.full(copy, np.nan, np.float32) for _ in arrays]
        self.redo = Redo(arrays, copies, np.zeros(2, np.int64))

    @property
    def bits(self) -> list[bytes]:
        return [array.tobytes() for array in self.redo.arrays]


def normal(size: int, seed: int) -> Flat:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


@every_update
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [0, 1, KERNEL_BLOCK - 1, KERNEL_BLOCK + 1, 2 * COPY + 77])
@pytest.mark.parametrize(("gradients", "count"), [(1, 1), (3, 4)])
def test_guarded_update_gives_the_bits_of_an_unguarded_one(
    update: Update, size: int, gradients: int, count: int, fused: bool
) -> None:
    guarded, plain = Memory(update, size), Memory(update, size)
    bound = as_fused(update, fused).bind(guarded.parameters, guarded.slots, guarded.redo)
    reference = update.bind(plain.parameters, plain.slots)
    for step in range(2):
        pushed = [normal(size, 10 * step + number) for number in range(gradients)]
        guarded.redo.begin()
        bound.apply_mean(pushed, count, step)
        reference.apply_mean(pushed, count, step)
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
        factors = factors_of(update, reference.squares([gradient], 1, 0), [size], 0)
    reference.apply_mean([gradient], 1, 0)
    part = slice(0, COPY)  # of it the process had done all, and had the next run ready in part
    slots = {name: slot[part] for name, slot in memory.slots.items()}
    left = Redo([a[part] for a in memory.redo.arrays], memory.redo.copies, memory.redo.progress)
    as_fused(update, first).bind(memory.parameters[part], slots, left).apply_mean(
        [gradient[part]], 1, 0, factors
    )
    for array, copy in zip(memory.redo.arrays, memory.redo.copies, strict=True):
        copy[:10] = array[COPY : COPY + 10]  # the old values, for which nothing has counted yet
    memory.redo.resume()
    second = as_fused(update, not first)
    bound = second.bind(memory.parameters, memory.slots, memory.redo)
    bound.apply_mean([gradient], 1, 0, factors)
    assert memory.bits == whole.bits


def test_loop_killed_at_any_line_leaves_what_can_be_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop as Python runs it; that compiled code keeps its order, test_parts.py shows."""
    monkeypatch.setattr(loops, "KERNEL_BLOCK", 2)
    monkeypatch.setattr(cpu, "KERNEL_BLOCK", 2)
    update = Update(Momentum(0.1), moving_average=0.9)
    whole, gradient = Memory(update, 5), normal(5, 1)
    update.bind(whole.parameters, whole.slots).apply_mean([gradient], 1, 0)
    monkeypatch.setattr(cpu, "_loaded", lambda formula, *_: loops.loop_of(formula))
    line, found = 0, set()
    while True:
        memory = Memory(update, 5, copy=2)
        bound = update.bind(memory.parameters, memory.slots, memory.redo)
        if not dying_at(line, lambda bound=bound: bound.apply_mean([gradient], 1, 0), LOOPS):  # type: ignore[misc]
            break
        progress = memory.redo.progress
        found.add((int(progress[DONE]), int(progress[READY])))
        memory.redo.resume()
        bound.apply_mean([gradient], 1, 0)
        assert memory.bits == whole.bits, f"killed at line {line}"
        line += 1
    assert found == {(0, 0), (0, 2), (2, 2), (2, 4), (4, 4), (4, 5), (5, 5)}
