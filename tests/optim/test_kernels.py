"""The fused kernels against the NumPy rules, of which they must give the exact numbers."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import compiled_elsewhere, compiled_here
from zmqtrain.errors import ConfigError
from zmqtrain.optim import (
    SGD,
    Adagrad,
    Adam,
    Flat,
    Ftrl,
    InverseTime,
    Momentum,
    Piecewise,
    RMSProp,
    Rule,
    Update,
    kernels,
    new_slots,
)
from zmqtrain.optim.blocks import BLOCK_SIZE
from zmqtrain.optim.kernels import compiler, cpu, loops, machine_code
from zmqtrain.optim.kernels.assembler import assemble, assembly_of
from zmqtrain.optim.pipeline import RUN_SIZE
from zmqtrain.optim.redo import Redo

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
]

LENGTHS = (0, 1, 7, 15, 16, 17, 63, 64, 65, BLOCK_SIZE - 1, BLOCK_SIZE + 1)
"""Around the widths of vectors and of unrolled loops, and the blocks of the NumPy rules."""

every_update = pytest.mark.parametrize(
    "update",
    UPDATES,
    ids=lambda update: f"{update.rule!r}"[:70] + "-average" * bool(update.moving_average),
)


class Run:
    """Parameters and slots in one arena each, from element ``offset`` on, margins around them."""

    def __init__(self, update: Update, size: int, offset: int = 0) -> None:
        self.update = update
        self.size = size
        self.arenas = {"parameters": self._normal(size + 20, 10**6)}
        for name, slot in new_slots(update, self.arenas["parameters"]).items():
            self.arenas[name] = slot
        self.inside = slice(offset, offset + size)

    def step(self, step: int, gradient: Flat | None = None) -> Run:
        if gradient is None:
            gradient = self.gradient(step)
        self.update.update(self.parameters, gradient, self.slots, step)
        return self

    def gradient(self, step: int) -> Flat:
        return self._normal(self.size + 1, step)[1:]

    @property
    def parameters(self) -> Flat:
        return self.arenas["parameters"][self.inside]

    @property
    def slots(self) -> dict[str, Flat]:
        return {slot.name: self.arenas[slot.name][self.inside] for slot in self.update.slots}

    @property
    def memory(self) -> dict[str, bytes]:
        return {name: arena.tobytes() for name, arena in self.arenas.items()}

    def _normal(self, size: int, number: int) -> Flat:
        return np.random.default_rng(number).standard_normal(size, np.float32)


def unfused(update: Update) -> Update:
    return replace(update, fused=False)


@every_update
def test_every_rule_has_a_kernel(update: Update) -> None:
    assert kernels.find(update.rule, np.zeros(1, np.float32)) is not None


@every_update
@pytest.mark.parametrize("size", LENGTHS)
def test_kernel_gives_the_numbers_of_the_numpy_rule_and_touches_nothing_else(
    update: Update, size: int
) -> None:
    fused, reference = Run(update, size, offset=3), Run(unfused(update), size, offset=3)
    for step in range(3):
        assert fused.step(step).memory == reference.step(step).memory


@every_update
@settings(deadline=None, max_examples=30)  # the first example may compile
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_kernel_run_by_run_equals_the_whole_bit_for_bit(update: Update, cuts: list[int]) -> None:
    whole, cut = Run(update, 200).step(0), Run(update, 200)
    for start, stop in pairwise([0, *sorted(cuts), 200]):
        run = slice(start, stop)
        slots = {name: slot[run] for name, slot in cut.slots.items()}
        update.update(cut.parameters[run], cut.gradient(0)[run], slots, 0)
    assert cut.memory == whole.memory


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
    assert kernels.find(rule, fused.parameters) is None
    assert fused.step(0).memory == reference.step(0).memory


def test_rule_derived_from_ours_keeps_its_own_update() -> None:
    run = Run(Update(Halved(1.0)), 1)
    before = run.parameters.copy()
    run.step(0, np.ones(1, np.float32))
    assert run.parameters[0] == before[0] - np.float32(0.5)


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
@pytest.mark.parametrize("size", [0, 5, RUN_SIZE + 5])
@pytest.mark.parametrize(("gradients", "count"), [(1, 1), (1, 3), (2, 2), (3, 5), (4, 4), (5, 5)])
def test_update_by_mean_is_the_update_by_the_sum_in_order_over_the_count(
    gradients: int, count: int, size: int, fused: bool
) -> None:
    update = Update(Momentum(0.1), fused=fused)
    by_mean, by_hand = Run(update, size), Run(update, size)
    pushed = [by_mean.gradient(number) for number in range(gradients)]
    total = pushed[0].copy()
    for gradient in pushed[1:]:
        total += gradient
    by_hand.step(7, total * np.float32(1 / count))
    update.bind(by_mean.parameters, by_mean.slots).apply_mean(pushed, count, 7)
    assert by_mean.memory == by_hand.memory
    assert all((pushed[number] == by_mean.gradient(number)).all() for number in range(gradients))


def forget_kernels() -> None:
    """As in a new process."""
    for cached in (
        kernels._cpu,
        kernels._lament,
        kernels._loaded,
        cpu.load_scaled_sum,
        machine_code.directory,
        machine_code._made_of,
    ):
        cached.cache_clear()


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_kernels()
    yield
    monkeypatch.undo()
    forget_kernels()


def sums() -> list[float]:
    out, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    kernels.scaled_sum(out, ones, ones, np.float32(2))
    return out.tolist()


@pytest.fixture
def elsewhere(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of tests, kernels are compiled by a process of their own."""
    monkeypatch.setattr(cpu, "_compiled", compiled_elsewhere)


def one_rules_trouble(symbol: str) -> bytes:
    if symbol != "scaled_sum":
        raise RuntimeError("no such thing")
    return compiled_here(symbol)


TROUBLES = {
    "no Numba": "PackageNotFoundError('numba')",
    "what Numba finds": "RuntimeError('the compiler ended with code 1: SyntaxError: no way')",
    "a death": "RuntimeError('the compiler ended with code -9: ')",
    "another answer": "RuntimeError(\"the compiler gave no code, but b'hello'\")",
    "no memory to execute": "PermissionError(1, 'no')",
    "one rule's alone": "RuntimeError('no such thing')",
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("trouble", TROUBLES)
def test_without_kernels_updates_are_the_same_and_a_warning_says_why(
    trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fused = Run(Update(Adam()), 100)
    fused.update.bind(fused.parameters, fused.slots).apply_mean([fused.gradient(0)] * 2, 2, 0)
    forget_kernels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    match trouble:
        case "no Numba":
            missing = Mock(side_effect=PackageNotFoundError("numba"))
            monkeypatch.setattr(machine_code, "version", missing)
        case "what Numba finds":
            (tmp_path / "numba.py").write_text("raise SyntaxError('no way')")
        case "a death":
            (tmp_path / "numba.py").write_text("import os; os.kill(os.getpid(), 9)")
        case "one rule's alone":
            compiled = Mock(side_effect=one_rules_trouble)
            monkeypatch.setattr(cpu, "_compiled", compiled)
        case "another answer":
            (tmp_path / "numba.py").write_text("print('hello', end='', flush=True); exit()")
        case "no memory to execute":
            monkeypatch.setattr("os.memfd_create", Mock(side_effect=PermissionError(1, "no")))
    plain = Run(Update(Adam()), 100)
    plain.update.warm_up(plain.parameters)
    plain.update.bind(plain.parameters, plain.slots).apply_mean([plain.gradient(0)] * 2, 2, 0)
    assert plain.memory == fused.memory
    why = TROUBLES[trouble]
    assert caplog.messages == [
        f"updates run in NumPy, several times slower, for want of kernels: {why}"
    ]
    if trouble == "one rule's alone":
        assert compiled.call_count == 2  # what failed is not tried again


@pytest.mark.usefixtures("elsewhere")
def test_kernel_is_compiled_once_for_all_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_it = Mock(side_effect=cpu._compiled)
    monkeypatch.setattr(cpu, "_compiled", compile_it)
    for _ in range(2):
        forget_kernels()
        assert sums() == [4, 4, 4]
    assert compile_it.call_count == 1
    assert machine_code.directory().parent == tmp_path / "zmqtrain"
    assert machine_code.kept("scaled_sum") is not None


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    "damage",
    [lambda b: b"", lambda b: b[:-1], lambda b: b[:-1] + b"x"],
    ids=["empty", "cut", "changed"],
)
def test_damaged_code_is_compiled_anew(
    damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sums()
    kept = machine_code.directory() / "scaled_sum"
    kept.write_bytes(damage(kept.read_bytes()))
    assert machine_code.kept(kept.name) is None
    forget_kernels()
    assert sums() == [4, 4, 4]
    assert machine_code.kept(kept.name) is not None


@pytest.mark.usefixtures("elsewhere")
def test_kernel_whose_code_cannot_be_kept_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    caplog.set_level("INFO", "zmqtrain")
    assert sums() == [4, 4, 4]
    assert "the compiler of scaled_sum said: it could not be kept: NotADirec" in caplog.text


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("unknown", ["home", "processor"])
def test_where_it_is_not_known_for_whom_nothing_is_kept(
    unknown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nothing").touch()
    if unknown == "home":
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setattr("os.path.expanduser", lambda path: path)  # it has this
    else:
        monkeypatch.setattr(machine_code, "_PROCESSORS", tmp_path / "nothing")
    with pytest.raises(RuntimeError):
        machine_code.keep("scaled_sum", b"code")
    assert machine_code.kept("scaled_sum") is None


@pytest.mark.usefixtures("anew")
def test_code_is_kept_though_who_wanted_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "zmqtrain.optim.kernels.compiler", "scaled_sum"]
    subprocess.run(command, stdout=writer, stderr=subprocess.DEVNULL, check=False)
    os.close(writer)
    assert machine_code.kept("scaled_sum") is not None


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("other", ["other-cpu", "other-numba", "other-sources"])
def test_code_for_others_is_not_taken(
    other: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = machine_code.directory()
    forget_kernels()
    if other == "other-cpu":
        monkeypatch.setattr(machine_code, "_processor", lambda: ("i386",))
    elif other == "other-sources":
        monkeypatch.setattr(machine_code, "__file__", str(tmp_path / "kernels/machine_code.py"))
        (tmp_path / "redo.py").touch()
    else:
        monkeypatch.setattr(machine_code, "version", lambda package: "0.0")
    assert machine_code.directory() != before


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("name", sorted(loops.FORMULAS))
def test_loop_is_compiled_to_vector_instructions(name: str, guarded: bool) -> None:
    """With all arrays that there can be; a loop that is not is many times slower, and as right."""
    slots = next(len(s.slots) for s in kernels.SIGNATURES.values() if s.kernel == name)
    ir, function = compiler.compile_kernel(name, (True,) * (2 + slots), guarded)
    assert (ir.count("fence release") >= 4) is guarded  # around both words of progress
    if platform.machine() == "x86_64":
        instructions = assembly_of(ir, function)
        assert re.search(r"\bv?(add|sub|mul)ps\b", instructions)
        assert not re.search(r"\bsqrtf\b", instructions)
        assert bool(re.search(r"\bv?sqrtps\b", instructions)) is ("sqrt" in ir)


def test_after_warming_up_no_update_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Update(Update(RMSProp(0.1, momentum=0.5, centered=True), moving_average=0.9), l2=0.1)
    run = Run(update, 100)
    update.warm_up(run.parameters)
    monkeypatch.setattr(cpu, "_address_of", None)
    update.bind(run.parameters, run.slots).apply_mean([run.gradient(0)] * 3, 3, 0)


def test_no_task_imports_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though here nobody has compiled before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check = (
        "import numpy, sys, zmqtrain.roles.ps, zmqtrain.roles.worker;"
        "from zmqtrain.optim import Adam, Update;"
        "Update(Adam()).warm_up(numpy.empty(0, numpy.float32), guarded=True);"
        "sys.exit(bool({'numba', 'llvmlite'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
    made = {path.name for path in tmp_path.glob("zmqtrain/*/*")}
    assert made == {"lock", "scaled_sum", "adam-1110-guarded"}


def run(body: str) -> float:
    """Return what a function of no arguments returns."""
    ir = f'target triple = "{llvm.get_process_triple()}"\n{body}'
    code = assemble(assembly_of(ir, "f"))
    return float(ctypes.CFUNCTYPE(ctypes.c_float)(machine_code.place(code))())


def test_code_that_calls_what_is_elsewhere_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"would have to be linked, it calls \['numba_new'\]"):
        run(
            "declare float @numba_new()"
            "define float @f() { %number = call float @numba_new() ret float %number }"
        )


def test_code_that_writes_to_data_of_its_own_is_refused() -> None:
    with pytest.raises(RuntimeError, match="would have to be linked"):
        run(
            "@data = internal global float 0.0 "
            "define float @f() { "
            "%number = load volatile float, ptr @data "
            "store volatile float 1.0, ptr @data ret float %number }"
        )


def test_code_finds_its_own_functions_and_constants() -> None:
    """At addresses that fit the instructions for aligned memory."""
    numbers = ", ".join(f"float {number}.0" for number in range(16))
    answer = run(
        "@byte = private constant i8 1 "
        f"@numbers = private constant <16 x float> <{numbers}>, align 64 "
        "define internal float @g() noinline { "
        "%byte = load volatile i8, ptr @byte "
        "%all = load volatile <16 x float>, ptr @numbers, align 64 "
        "%last = extractelement <16 x float> %all, i64 15 ret float %last } "
        "define float @f() { %number = call float @g() ret float %number }"
    )
    assert answer == 15


def test_no_kernel_is_loaded_before_it_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "backend_of", None)
    run = Run(Update(SGD(), fused=False), 10)
    bound = run.update.bind(run.parameters, run.slots)
    bound.apply_mean([run.gradient(0)] * 3, 3, 0)


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("other", ["another user's", "open to others", "of another symbol"])
def test_code_that_others_could_have_written_is_not_taken(
    other: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine_code.keep("scaled_sum", b"code")
    path = machine_code.directory() / "scaled_sum"
    assert machine_code.kept("scaled_sum") == b"code"
    if other == "another user's":
        monkeypatch.setattr("os.geteuid", lambda: 12345)
    elif other == "open to others":
        path.chmod(0o620)
    else:
        path.rename(path.with_name("adam-1110"))
    assert machine_code.kept("adam-1110" if other == "of another symbol" else "scaled_sum") is None


@pytest.mark.usefixtures("anew")
def test_relative_cache_directory_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert machine_code.directory().is_absolute()


def test_kernel_keeps_the_arrays_that_it_writes_to() -> None:
    update = Update(Momentum(0.1))
    run = Run(update, 10_000)
    slots = {name: slot.copy() for name, slot in run.slots.items()}
    gone = weakref.ref(slots["momentum"])
    bound = update.bind(run.parameters, slots)
    slots.clear()
    gc.collect()
    assert gone() is not None
    bound.apply_mean([run.gradient(0)], 1, 0)


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
    with pytest.raises(TypeError, match=r"of float32, one behind the other, writable"):
        Update(SGD()).bind(wrong, {})
    readable = np.zeros(len(wrong), np.float32)
    with pytest.raises(TypeError, match=r"of float32, one behind the other, writable"):
        kernels.scaled_sum(wrong, readable, readable, np.float32(1))


def guarded(areas: int = 4096, progress: Any = np.int64, slot: int = 4096) -> None:
    parameters = np.zeros(4096, np.float32)
    slots = {"momentum": np.zeros(slot, np.float32)}
    beside = [np.zeros(areas, np.float32) for _ in range(2)]
    redo = Redo([parameters, *slots.values()], beside, np.zeros(2, progress))
    Update(Momentum(0.1)).bind(parameters, slots, redo)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"areas": 4095}, "4095 elements of float32 .* expected 4096 of float32"),
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


def test_sum_of_unequal_lengths_is_refused() -> None:
    out, short = np.zeros(3, np.float32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="a sum of 3 and 2 elements; expected 3 of each"):
        kernels.scaled_sum(out, np.zeros(3, np.float32), short, np.float32(1))


def test_gradient_longer_than_the_parameters_is_refused() -> None:
    run = Run(Update(SGD()), 10)
    before = run.memory
    with pytest.raises(ValueError, match="a gradient from 0 to 11; expected at most 10 elements"):
        run.step(0, np.ones(11, np.float32))
    assert run.memory == before
