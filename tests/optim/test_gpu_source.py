"""The source of a GPU's kernels, run on the CPU, and how it is launched: NumPy's bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.constants import Constants
from tests.cupy_stand_in import installed
from tests.gpu_source import COMPILER, kernel_of
from tests.optim.runs import Run
from tests.optim.test_kernels import LAYERED, UPDATES, inverted, named, unfused
from zmqtrain.models.backend import on_host
from zmqtrain.optim import SGD, Flat, LayerRule, Mean, Momentum, Update
from zmqtrain.optim.kernels import Operands, Scalars, gpu
from zmqtrain.optim.kernels.base import warn
from zmqtrain.optim.kernels.reference import FormulaKernel
from zmqtrain.optim.kernels.source import source_for
from zmqtrain.optim.mean import add_up

MOST = gpu.MOST_TERMS

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

GRIDS = [(1, 1, False), (1, 32, True), (3, 33, False), (40, 256, True)]
"""Blocks, threads in each, and whether the last thread begins."""

SPECIAL = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-38, -1e-38, 1e-40, -1e-40, 1e-45, -1e-45],
    np.float32,
)


def with_extremes(size: int, seed: int) -> Flat:
    """Return normal numbers, special ones among them, and many that are subnormal or nearly so."""
    random = np.random.default_rng(seed)
    flat = random.standard_normal(size, np.float32)
    flat[::3] *= np.float32(1e-39)
    flat[1::7] = random.choice(SPECIAL, len(flat[1::7]))
    return flat


def assert_same_bits(found: Any, expected: Flat) -> None:
    """NaN may have any of its bit patterns. ``found``: perhaps on a device."""
    found = on_host(found)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    found, expected = np.where(nan, 0, found), np.where(nan, 0, expected)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def assert_same_memory(found: Run, expected: Run) -> None:
    for name, arena in expected.arenas.items():
        assert_same_bits(found.arenas[name], arena)


def given(update: Update, run: Run, step: int) -> tuple[Operands, Scalars]:
    """Return what the kernel of an update is made from."""
    average, l2 = "average" if update.moving_average else None, np.float32(update.l2)
    rule: Any = update.rule
    operands = Operands(rule, run.parameters, run.slots, average, l2 if update.l2 else None)
    factor = np.float32(0.01) if isinstance(rule, LayerRule) else None
    share = update.share(step + 1)
    return operands, Scalars(step, rule.hyperparameters(step), np.float32(0.5), share, factor)


@needs_compiler
@pytest.mark.parametrize("update", [*UPDATES, *LAYERED], ids=named)
def test_source_gives_the_bits_of_numpy_on_any_grid(update: Update) -> None:
    """Memory begins at an odd element; what lies around it stays as it was."""
    for size in (1, 31, 1000):
        for grid, (blocks, threads, backward) in enumerate(GRIDS):
            found, expected = (Run(update, size, offset=grid + 1) for _ in range(2))
            for arena, reference in zip(
                found.arenas.values(), expected.arenas.values(), strict=True
            ):
                arena[:] = reference[:] = np.abs(with_extremes(len(arena), 1))
            for step in range(2):
                gradient = with_extremes(size, step)
                operands, scalars = given(update, found, step)
                numbers = [n for n in scalars.numbers if not isinstance(n, bool)]
                numbers += scalars.others(operands.l2)
                arrays = [array for array in operands.arrays if array is not None]
                kernel_of(source_for(operands, scalars))(
                    (blocks,),
                    (threads,),
                    (np.int64(size), gradient, *numbers, *arrays),
                    backward=backward,
                )
                operands, scalars = given(update, expected, step)
                FormulaKernel(operands)(gradient, 0, scalars)
                assert_same_memory(found, expected)


# Launches


@pytest.fixture(
    params=[
        pytest.param("stand-in", marks=needs_compiler),
        pytest.param("device", marks=pytest.mark.gpu),
    ]
)
def cupy(request: pytest.FixtureRequest) -> Iterator[Any]:
    for cached in (gpu.compiled, warn):
        cached.cache_clear()
    if request.param == "stand-in":
        with installed(1) as module:
            yield module
        gpu.compiled.cache_clear()
        return
    module = pytest.importorskip("cupy")
    if not module.is_available():
        pytest.skip("no CUDA device")
    yield module


def on_device(run: Run, cupy: Any) -> Run:
    run.arenas = {name: cupy.asarray(arena) for name, arena in run.arenas.items()}
    return run


def pair(update: Update, size: int, cupy: Any, offset: int = 3) -> tuple[Run, Run]:
    """Return the same memory on a device and, with NumPy's rules, on the host."""
    found, expected = Run(update, size, offset), Run(unfused(update), size, offset)
    for name, arena in expected.arenas.items():
        arena[:] = found.arenas[name][:] = np.abs(with_extremes(len(arena), 1))
    return on_device(found, cupy), expected


def apply(run: Run, mean: Mean, step: int) -> None:
    run.rule.bind(run.parameters, run.slots).apply(mean, step)  # type: ignore[attr-defined]


def apply_both(found: Run, expected: Run, mean: Mean, step: int, cupy: Any) -> None:
    apply(expected, mean, step)
    apply(found, mean._replace(gradients=[cupy.asarray(each) for each in mean.gradients]), step)
    assert_same_memory(found, expected)


@pytest.mark.parametrize("update", UPDATES, ids=named)
def test_update_on_a_device_gives_the_bits_of_the_numpy_rule(update: Update, cupy: Any) -> None:
    found, expected = pair(update, 1000, cupy)
    for step in range(2):
        gradients = [with_extremes(1000, number) for number in range(step, step + 3)]
        apply_both(found, expected, Mean(gradients, 3), step, cupy)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 513])
def test_any_number_of_elements_is_updated(size: int, cupy: Any, constants: Constants) -> None:
    """Here a thread has several elements in spite of the small numbers."""
    constants(gpu, THREADS=32, MOST_BLOCKS=3)
    found, expected = pair(Update(Momentum(0.1), moving_average=0.9), size, cupy)
    for step in range(2):
        apply_both(found, expected, Mean([with_extremes(size, step)]), step, cupy)


LIMITS: list[dict[str, float]] = [
    {},
    {"clip_value": 0.5},
    {"clip_norm": 1e30},
    {"clip_value": 1e-39, "clip_norm": 1e30},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_mean_on_a_device_has_the_bits_of_one_on_the_host(
    limits: dict[str, Any], cupy: Any
) -> None:
    for terms, weights in product((1, 2, 5), (None, [1.0, 0.25, 1 / 3, 0.7, 0.9])):
        found, expected = pair(Update(SGD(0.1), **limits), 300, cupy)
        gradients = [with_extremes(300, number) for number in range(terms)]
        mean = Mean(gradients, terms, weights and weights[:terms])
        apply_both(found, expected, mean, 0, cupy)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("terms", [1, MOST, MOST + 1, 3 * MOST + 1])
def test_sum_of_more_terms_than_a_kernel_takes_is_added_in_order(
    terms: int, weighted: bool, cupy: Any
) -> None:
    given = [with_extremes(100, number) for number in range(terms)]
    weights = [1 / (1 + number) if weighted else 1 for number in range(terms)]
    options = {"factor": 1 / 3, "limit": 2.0}
    found, expected = cupy.zeros(100, np.float32), np.zeros(100, np.float32)
    add_up([cupy.asarray(each) for each in given], weights, found, **options)
    add_up(given, weights, expected, **options)
    assert_same_bits(found, expected)


def test_sum_goes_to_its_first_term(cupy: Any) -> None:
    first, second = with_extremes(100, 1), with_extremes(100, 2)
    found, expected = cupy.asarray(first), first.copy()
    add_up([found, cupy.asarray(second)], [1.0, 0.3], found)
    add_up([expected, second], [1.0, 0.3], expected)
    assert_same_bits(found, expected)


def test_unfused_update_on_a_device_keeps_subnormal_numbers_too(cupy: Any) -> None:
    update = Update(Momentum(0.1), fused=False)
    found, expected = pair(update, 100, cupy)
    apply_both(found, expected, Mean([with_extremes(100, 0)]), 0, cupy)


@pytest.mark.parametrize(
    "as_given",
    [lambda flat: flat.repeat(2)[::2], lambda flat: flat.astype(np.float64)],
    ids=["with gaps", "float64"],
)
def test_gradient_of_another_form_is_copied(as_given: Any, cupy: Any) -> None:
    found, expected = pair(Update(SGD(0.1)), 100, cupy)
    gradient = found.gradient(0)
    apply(expected, Mean([gradient]), 0)
    apply(found, Mean([as_given(cupy.asarray(gradient))]), 0)
    assert_same_memory(found, expected)


def test_gradient_longer_than_the_parameters_on_a_device_is_refused(cupy: Any) -> None:
    found, _ = pair(Update(SGD(0.1)), 10, cupy)
    with pytest.raises(ValueError, match="arrays of 11 and 10 elements; expected the same size"):
        apply(found, Mean([cupy.zeros(11, np.float32)]), 0)


@pytest.mark.parametrize(("dtype", "gaps"), [(np.float32, 2), (np.float64, 1)])
def test_parameters_that_a_kernel_cannot_write_on_a_device_are_refused(
    dtype: Any, gaps: int, cupy: Any
) -> None:
    parameters, gradient = cupy.zeros(4 * gaps, dtype)[::gaps], cupy.zeros(4, np.float32)
    with pytest.raises(TypeError, match="expected contiguous float32"):
        Update(SGD(0.1)).update(parameters, gradient, {}, 0)


def test_formula_without_a_kernel_runs_as_written_and_one_warning_says_why(
    cupy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found, expected = pair(Update(inverted()), 100, cupy)
    for step in range(2):
        gradient = expected.gradient(step)
        apply(expected, Mean([gradient]), step)
        apply(found, Mean([cupy.asarray(gradient)]), step)
    np.testing.assert_allclose(on_host(found.parameters), expected.parameters, rtol=1e-5)
    (message,) = caplog.messages
    assert "numpy.arctan" in message
