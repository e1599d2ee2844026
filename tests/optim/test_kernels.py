"""The fused kernels against the NumPy rules, of which they must give the exact numbers."""

from __future__ import annotations

import gc
import platform
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from tests.modules import Modules
from tests.optim.runs import Run
from zmqtrain.compute.arrays import BLOCK_SIZE
from zmqtrain.errors import ConfigError
from zmqtrain.optim import (
    LAMB,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Flat,
    Ftrl,
    InverseTime,
    Lion,
    Mean,
    Momentum,
    NAdam,
    Piecewise,
    RAdam,
    RMSProp,
    Rule,
    Update,
    kernels,
)
from zmqtrain.optim.formula import Formula
from zmqtrain.optim.kernels import cpu
from zmqtrain.optim.kernels.base import warn
from zmqtrain.optim.kernels.llvm import target_machine
from zmqtrain.optim.redo import Redo


class Bounded(SGD):
    """A rule of a third party, with operations that none of ours has."""

    formula = staticmethod(
        lambda w, g, rate: (w - np.minimum(np.maximum(rate * g, -rate), rate + -w),)
    )


# One row with a moving average for each rule: the kernel compiles once more for it.
UPDATES = [
    Update(SGD(0.1)),
    Update(SGD(InverseTime(0.1, 1, 0.5)), l2=0.1, moving_average=0.9),
    Update(Momentum(0.1)),
    Update(Momentum(0.1, nesterov=True), l2=0.1),
    Update(Momentum(0.1, scaled_velocity=True)),
    Update(Momentum(0.1, 0.5, nesterov=True, scaled_velocity=True), l2=0.1, moving_average=0.9),
    Update(Momentum(0.1, momentum=0.0)),
    Update(Adagrad(0.1)),
    Update(Adagrad(0.1, 0.0, epsilon=0.01), l2=0.1),
    Update(Adagrad(0.1, epsilon=0.01, epsilon_inside_sqrt=True), l2=0.1, moving_average=0.9),
    Update(RMSProp(0.1)),
    Update(RMSProp(0.1, epsilon=0.01, epsilon_inside_sqrt=False), l2=0.1),
    Update(RMSProp(0.1, rho=0.5, momentum=0.5)),
    Update(RMSProp(0.1, rho=0.5, centered=True, epsilon=0.01)),
    Update(RMSProp(0.1, momentum=0.5, centered=True, epsilon=0.01), l2=0.1, moving_average=0.9),
    Update(Adam(0.1)),
    Update(Adam(0.1, nesterov=True), l2=0.1),
    Update(Adam(0.1, beta1=0.0, beta2=0.5, epsilon=0.1), l2=0.1, moving_average=0.9),
    Update(Ftrl(0.1)),
    Update(Ftrl(0.1, l1=0.4, l2=0.3, l2_shrinkage=0.1, beta=0.2), l2=0.1, moving_average=0.9),
    Update(AdamW(0.1)),
    Update(AdamW(0.1, amsgrad=True)),
    Update(Momentum(0.1, dampening=0.5)),
    Update(RMSProp.torch(0.1, momentum=0.5, centered=True)),
    Update(AdamW(0.1, weight_decay=0.5), l2=0.1, moving_average=0.9),
    Update(NAdam(0.1, weight_decay=0.5), l2=0.1, moving_average=0.9),
    Update(RAdam(0.1)),
    Update(RAdam(0.1, beta2=0.5, weight_decay=0.5), l2=0.1, moving_average=0.9),
    Update(Adamax(0.1)),
    Update(Adamax(0.1, epsilon_in_max=False), l2=0.1, moving_average=0.9),
    Update(Lion(0.1)),
    Update(Lion(0.1, 0.5, 0.3, weight_decay=0.5), l2=0.1, moving_average=0.9),
    Update(Bounded(0.1), l2=0.1, moving_average=0.9),
]

LAYERED = [
    Update(LAMB(0.1)),
    Update(LAMB(0.1, weight_decay=0.5), l2=0.1, moving_average=0.9),
    Update(Adafactor(0.1)),
    Update(Adafactor(0.1, clip=0.5, relative_step=False), l2=0.1, moving_average=0.9),
]
"""Updates with norms of whole variables, which may not be cut anywhere."""

LENGTHS = (0, 1, 7, 15, 16, 17, 63, 64, 65, BLOCK_SIZE - 1, BLOCK_SIZE + 1)
"""Around the widths of vectors and of unrolled loops, and the blocks of the NumPy rules."""


def named(update: Update) -> str:
    return f"{update.rule!r}"[:70] + "-average" * bool(update.moving_average)


every_update = pytest.mark.parametrize("update", [*UPDATES, *LAYERED], ids=named)


def unfused(update: Update) -> Update:
    return replace(update, fused=False)


def kernel_of(update: Update, redo: Redo | None = None, size: int = 10) -> kernels.Kernel:
    run = Run(update, size)
    average = "average" if update.moving_average else None
    l2 = np.float32(update.l2) if update.l2 else None
    operands = kernels.Operands(update.rule, run.parameters, run.slots, average, l2, redo)
    return kernels.bind(operands, compiled=True)


@every_update
def test_kernel_gives_the_numbers_of_the_numpy_rule_and_touches_nothing_else(
    update: Update,
) -> None:
    for size in LENGTHS:
        fused, reference = Run(update, size, offset=3), Run(unfused(update), size, offset=3)
        for step in range(3):
            assert fused.step(step).memory == reference.step(step).memory, size


@every_update
def test_kernel_on_other_alignment_gives_the_same_bits(update: Update) -> None:
    runs = [Run(update, 1000, offset) for offset in range(4)]
    start = runs[0].parameters.copy()
    for run in runs:
        for memory in (run.parameters, *run.slots.values()):
            memory[:] = np.abs(start)
        run.step(0)
    assert len({run.parameters.tobytes() for run in runs}) == 1


@every_update
def test_non_finite_and_extreme_gradients_give_what_the_numpy_rule_gives(update: Update) -> None:
    fused, reference = Run(update, 100), Run(unfused(update), 100)
    gradient = fused.gradient(0)
    gradient[[0, 17, 40, 99]] = np.nan, np.inf, -np.inf, np.nan
    gradient[[5, 6, 7, 8]] = 3e38, -3e38, 1e-40, -0.0
    for step in range(2):
        fused.step(step, gradient)
        reference.step(step, gradient)
    for name, arena in fused.arenas.items():
        np.testing.assert_array_equal(arena, reference.arenas[name])
    assert not np.isfinite(fused.parameters[[0, 99]]).any()


@pytest.mark.parametrize(
    "as_received",
    [
        lambda gradient: np.frombuffer(gradient.tobytes(), np.float32),
        lambda gradient: np.frombuffer(b"x" + gradient.tobytes(), np.float32, offset=1),
        lambda gradient: np.repeat(gradient, 2)[::2],
    ],
    ids=["read-only", "at an odd address", "with gaps"],
)
def test_gradient_in_a_received_frame_is_taken_as_it_lies(
    as_received: Callable[[Flat], Flat],
) -> None:
    update = Update(Adam(0.1))
    own, received = Run(update, 100), Run(update, 100)
    assert received.step(0, as_received(own.gradient(0))).memory == own.step(0).memory


@dataclass(frozen=True, slots=True)
class Halved(SGD):
    """A rule of a third party, derived from ours."""

    def update(self, parameters: Flat, gradient: Flat, slots: Any, step: int) -> None:
        SGD.update(self, parameters, gradient * np.float32(0.5), slots, step)


@pytest.mark.parametrize("rule", [Halved(1.0), Ftrl(0.1, learning_rate_power=-0.3)])
def test_rule_without_a_kernel_runs_as_written(rule: Rule) -> None:
    fused, reference = Run(Update(rule), 100), Run(unfused(Update(rule)), 100)
    assert not isinstance(kernel_of(Update(rule)), cpu.CpuKernel)
    assert fused.step(0).memory == reference.step(0).memory


def test_schedule_without_a_rate_is_refused_before_anything_changes() -> None:
    run = Run(Update(Ftrl(Piecewise((0,), (0.1, 0.0)))), 10)
    before = run.step(0).memory
    with pytest.raises(ConfigError, match="the learning rate is 0 at step 1"):
        run.step(1)
    assert run.memory == before


def test_fused_is_no_part_of_what_an_update_is() -> None:
    assert unfused(Update(SGD())) == Update(SGD())
    assert repr(unfused(Update(SGD()))) == repr(Update(SGD()))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("gradients", "count"), [(1, 1), (1, 3), (2, 2), (3, 5), (4, 4), (5, 5)])
def test_update_by_mean_is_the_update_by_the_sum_in_order_over_the_count(
    gradients: int, count: int, fused: bool
) -> None:
    update = Update(Momentum(0.1), fused=fused)
    for size in (0, 5, BLOCK_SIZE + 5):
        by_mean, by_hand = Run(update, size), Run(update, size)
        pushed = [by_mean.gradient(number) for number in range(gradients)]
        total = pushed[0].copy()
        for gradient in pushed[1:]:
            total += gradient
        by_hand.step(7, total * np.float32(1 / count))
        update.bind(by_mean.parameters, by_mean.slots).apply(Mean(pushed, count), 7)
        assert by_mean.memory == by_hand.memory, size
        assert all((each == by_mean.gradient(n)).all() for n, each in enumerate(pushed))


@pytest.fixture
def anew() -> Iterator[None]:
    """As in a new process, which has not warned."""
    warn.cache_clear()
    yield
    warn.cache_clear()


def own_rule(formula: Formula) -> Rule:
    """Return a rule of a third party, whose formula no kernel has been compiled for."""
    return type("Own", (SGD,), {"formula": staticmethod(formula)})(0.1)


def inverted() -> Rule:
    """Return one with an operation that has no counterpart in a kernel."""
    return own_rule(lambda w, g, rate: (w - rate * np.arctan(g),))


@pytest.mark.parametrize("trouble", ["no LLVM", "a formula that it cannot compile"])
@pytest.mark.usefixtures("anew")
def test_without_kernels_updates_are_the_same_and_one_warning_says_why(
    trouble: str,
    modules: Modules,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    update = Update(inverted() if "formula" in trouble else Adam())
    if trouble == "no LLVM":
        modules("zmqtrain.optim.kernels.cpu", None)
        monkeypatch.delattr(kernels, "cpu")
    plain, reference = Run(update, 100), Run(unfused(update), 100)
    for step in range(2):
        assert plain.step(step).memory == reference.step(step).memory
    (message,) = caplog.messages
    assert "falling back to NumPy" in message


@pytest.mark.parametrize("update", [*UPDATES, *LAYERED], ids=named)
def test_loop_is_compiled_to_vector_instructions(update: Update) -> None:
    """A loop that is not is many times slower, and as right."""
    guarded = update.moving_average is not None  # so that the fullest loops are looked at
    run = Run(update, 10)
    arrays = [run.parameters, *run.slots.values()]
    redo = Redo(arrays, [array.copy() for array in arrays], np.zeros(2, np.int64))
    kernel = kernel_of(update, redo if guarded else None)
    module = kernel.loop.module  # type: ignore[attr-defined]
    ir = str(module)
    assert (ir.count("fence release") >= 4) is guarded  # around both words of progress
    if platform.machine() == "x86_64":
        instructions = target_machine().emit_assembly(module)
        assert re.search(r"\bv?(add|sub|mul)ps\b", instructions)
        assert not re.search(r"\bv?fn?m(add|sub)", instructions)  # it would round once, not twice
        assert not re.search(r"\bsqrtf\b", instructions)
        assert bool(re.search(r"\bv?sqrtps\b", instructions)) is ("sqrt" in ir)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX is of x86")
def test_loop_is_for_the_processor_on_which_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code is kept: on a host without AVX a ps compiles its own."""
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "x86-64")
    monkeypatch.setattr(llvm, "get_host_cpu_features", llvm.FeatureMap)
    update = Update(own_rule(lambda w, g, rate: (w - rate * g,)))
    plain, reference = Run(update, 100), Run(unfused(update), 100)
    assert plain.step(0).memory == reference.step(0).memory
    kernel = kernel_of(update)  # it keeps its code
    instructions = target_machine().emit_assembly(kernel.loop.module)  # type: ignore[attr-defined]
    assert re.search(r"\b(add|sub|mul)ps\b", instructions)
    assert not re.search(r"\bv(add|sub|mul)ps\b|%ymm", instructions)


@every_update
def test_a_loop_is_compiled_once_for_all_memory(update: Update) -> None:
    small, large = kernel_of(update, size=10), kernel_of(update, size=100)
    assert isinstance(small, cpu.CpuKernel) and isinstance(large, cpu.CpuKernel)
    assert small.loop is large.loop


def test_kernel_keeps_the_arrays_that_it_writes_to() -> None:
    update = Update(Momentum(0.1))
    run = Run(update, 10_000)
    slots = {name: slot.copy() for name, slot in run.slots.items()}
    gone = weakref.ref(slots["momentum"])
    bound = update.bind(run.parameters, slots)
    slots.clear()
    gc.collect()
    assert gone() is not None
    bound.apply(Mean([run.gradient(0)]), 0)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(4, np.float64),
        np.zeros(8, np.float32)[::2],
        np.frombuffer(bytes(16), np.float32),
        np.frombuffer(bytearray(17), np.float32, offset=1),
    ],
    ids=["float64", "strided", "read-only", "at an odd address"],
)
def test_parameters_that_a_kernel_cannot_write_are_refused(wrong: Flat) -> None:
    with pytest.raises(TypeError, match=r"of float32, contiguous, writable"):
        Update(SGD()).bind(wrong, {})


def guarded(copies: int = 4096, progress: Any = np.int64, slot: int = 4096) -> None:
    parameters = np.zeros(4096, np.float32)
    slots = {"momentum": np.zeros(slot, np.float32)}
    beside = [np.zeros(copies, np.float32) for _ in range(2)]
    redo = Redo([parameters, *slots.values()], beside, np.zeros(2, progress))
    Update(Momentum(0.1)).bind(parameters, slots, redo)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"copies": 4095}, "4095 elements of float32 .* expected 4096 of float32"),
        ({"slot": 4095}, "4095 elements of float32 .* expected 4096 of float32"),
        ({"slot": 4097}, "4097 elements of float32 .* expected 4096 of float32"),
        ({"progress": np.int32}, r"progress of \(2,\) int32; expected 2 int64"),
    ],
)
def test_memory_that_a_kernel_would_write_beyond_is_refused(
    wrong: dict[str, Any], complaint: str
) -> None:
    guarded()
    with pytest.raises(TypeError, match=complaint):
        guarded(**wrong)


def test_gradient_longer_than_the_parameters_is_refused() -> None:
    run = Run(Update(SGD()), 10)
    before = run.memory
    with pytest.raises(ValueError, match="a gradient from 0 to 11; expected at most 10 elements"):
        run.step(0, np.ones(11, np.float32))
    assert run.memory == before
