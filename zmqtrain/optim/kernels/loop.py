"""The loop over memory that LLVM compiles for a formula: one pass, without the GIL.

Arithmetic is IEEE float32 in the order of the formula, as in NumPy: without fast-math flags, LLVM
neither reorders operations nor fuses a product and a sum. To be fast the loop must vectorise, so it
has no branch in it, and no two arrays overlap.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from zmqtrain.optim.kernels.trace import Operand, Trace
from zmqtrain.optim.redo import DONE, KERNEL_BLOCK, READY

_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_FLOATS, _INTS = _FLOAT.as_pointer(), _INT.as_pointer()
_IN_C: dict[ir.Type, Any] = {
    _FLOAT: ctypes.c_float,
    _INT: ctypes.c_int64,
    _FLOATS: ctypes.c_void_p,
    _INTS: ctypes.c_void_p,
}
_BINARY = {np.add: "fadd", np.subtract: "fsub", np.multiply: "fmul", np.divide: "fdiv"}
_ORDERS = {np.maximum: ">=", np.minimum: "<="}
_INTRINSICS = {np.sqrt: "llvm.sqrt", np.abs: "llvm.fabs"}

_lock = threading.Lock()  # LLVM's context is global

Values: TypeAlias = dict[str, ir.Value]


@dataclass(frozen=True)
class Loop:
    """A compiled loop, and the address of its code.

    ``run(start, stop, gradient, *arrays, *copies, progress, *numbers)`` updates the elements from
    ``start`` to ``stop``, of which ``gradient`` holds those of the gradient. Arrays are given by
    their addresses. A crash-safe loop has ``copies``, one for each array, to which new values go
    before they go to the arrays, and ``progress``: see redo.py; others have neither.
    """

    run: Callable[..., None]
    address: int
    module: llvm.ModuleRef  # the optimised code, in LLVM's language
    engine: llvm.ExecutionEngine  # owner of the compiled code


def compiled(trace: Trace, *, guarded: bool) -> Loop:
    """Compile the loop of an update, ``guarded`` if it is to be crash-safe; takes some 40 ms.

    Raises:
        NotImplementedError: the formula uses what has no counterpart here.
    """
    function = _function(trace, guarded)
    module, engine = engine_of(function.module)
    address = engine.get_function_address(function.name)
    types = [_IN_C[argument.type] for argument in function.args]
    run: Any = ctypes.CFUNCTYPE(None, *types)(address)
    return Loop(run, address, module, engine)


def engine_of(source: ir.Module) -> tuple[llvm.ModuleRef, llvm.ExecutionEngine]:
    """Compile a module; return it as LLVM optimised it, and the owner of the compiled code."""
    with _lock:
        module, machine = llvm.parse_assembly(str(source)), target_machine()
        module.triple, module.data_layout = machine.triple, str(machine.target_data)
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(module, passes)
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.finalize_object()
    return module, engine


def target_machine() -> llvm.TargetMachine:
    """Return LLVM's description of the processor that this process runs on."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )


def _function(trace: Trace, guarded: bool) -> ir.Function:
    """Return the function of a loop, in LLVM's language."""
    copies = [f"{name}_copy" for name in trace.arrays] if guarded else []
    types = {"start": _INT, "stop": _INT, "g": _FLOATS}
    types |= dict.fromkeys((*trace.arrays, *copies), _FLOATS)
    types |= {"progress": _INTS} if guarded else {}
    types |= dict.fromkeys(trace.numbers, _FLOAT)
    kind = ir.FunctionType(ir.VoidType(), list(types.values()))
    function = ir.Function(ir.Module(), kind, "update")
    for argument in function.args:
        if argument.type.is_pointer:
            argument.add_attribute("noalias")
    given = dict(zip(types, function.args, strict=True))
    start, stop = given["start"], given["stop"]
    build = ir.IRBuilder(function.append_basic_block())
    given["g"] = build.gep(given["g"], [build.neg(start)])  # from here on element i belongs to i
    if not guarded:
        with counted(build, start, stop, 1) as i:
            _element(build, trace, given, i, [given[name] for name in trace.arrays])
    else:
        with counted(build, start, stop, KERNEL_BLOCK) as begin:
            end = build.add(begin, ir.Constant(_INT, KERNEL_BLOCK))
            end = build.select(build.icmp_signed("<", end, stop), end, stop)
            new = [build.gep(given[copy], [build.neg(begin)]) for copy in copies]
            with counted(build, begin, end, 1) as i:
                _element(build, trace, given, i, new)
            _note(build, given["progress"], READY, end)
            with counted(build, begin, end, 1) as i:
                for name, copy in zip(trace.arrays, new, strict=True):
                    build.store(build.load(build.gep(copy, [i])), build.gep(given[name], [i]))
            _note(build, given["progress"], DONE, end)
    build.ret_void()
    return function


@contextmanager
def counted(
    build: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int | ir.Value
) -> Iterator[ir.Value]:
    """Repeat what is built in this context for each number from ``start`` to ``stop``."""
    before = build.block
    head, body, after = (build.append_basic_block(name) for name in ("head", "body", "after"))
    build.branch(head)
    build.position_at_end(head)
    number = build.phi(_INT)
    number.add_incoming(start, before)
    build.cbranch(build.icmp_signed("<", number, stop), body, after)
    build.position_at_end(body)
    yield number
    by = ir.Constant(_INT, step) if isinstance(step, int) else step
    number.add_incoming(build.add(number, by, flags=["nsw"]), build.block)
    build.branch(head)
    build.position_at_end(after)


def repeated(name: str, one: ir.Function) -> None:
    """Build ``name(n, calls)`` beside a function that it calls with each row of an int64 array.

    Numbers for pointers are addresses.
    """
    kind = ir.FunctionType(ir.VoidType(), [_INT, _INTS])
    function = ir.Function(one.module, kind, name)
    n, calls = function.args
    build, width = ir.IRBuilder(function.append_basic_block()), ir.Constant(_INT, len(one.args))
    with counted(build, ir.Constant(_INT, 0), n, 1) as i:
        row, given = build.gep(calls, [build.mul(i, width)]), []
        for place, argument in enumerate(one.args):
            value = build.load(build.gep(row, [ir.Constant(_INT, place)]))
            is_address = argument.type.is_pointer
            given.append(build.inttoptr(value, argument.type) if is_address else value)
        build.call(one, given)
    build.ret_void()


def _element(
    build: ir.IRBuilder, trace: Trace, given: Values, i: ir.Value, new: list[ir.Value]
) -> None:
    """Build the update of element ``i``, whose new values go to the arrays ``new``."""
    values = {name: given[name] for name in trace.numbers}
    for name in ("g", *trace.arrays):
        values[name] = build.load(build.gep(given[name], [i]))
    for operation in trace.operations:
        operands = [_value(values, operand) for operand in operation.operands]
        values[operation.name] = _operation(build, operation.ufunc, *operands)
    for result, array in zip(trace.results, new, strict=True):
        build.store(values[result], build.gep(array, [i]))


def _value(values: Values, operand: Operand) -> ir.Value:
    return values[operand] if isinstance(operand, str) else _constant(operand)


def _constant(number: float) -> ir.Constant:
    return ir.Constant(_FLOAT, number)


def _operation(build: ir.IRBuilder, ufunc: np.ufunc, x: ir.Value, *others: ir.Value) -> ir.Value:
    """Build one operation, which gives NumPy's bits."""
    if ufunc in _BINARY:
        return getattr(build, _BINARY[ufunc])(x, *others)
    if ufunc in _INTRINSICS:
        return build.call(build.module.declare_intrinsic(_INTRINSICS[ufunc], [_FLOAT]), [x])
    if ufunc is np.negative:
        return build.fneg(x)
    if ufunc in _ORDERS:  # NaN of either stays
        (y,) = others
        is_first = build.fcmp_ordered(_ORDERS[ufunc], x, y)
        is_first = build.or_(is_first, build.fcmp_unordered("uno", x, x))
        return build.select(is_first, x, y)
    if ufunc is np.sign:  # NaN stays
        zero = _constant(0)
        found = build.select(build.fcmp_ordered("==", x, zero), zero, x)
        found = build.select(build.fcmp_ordered("<", x, zero), _constant(-1), found)
        return build.select(build.fcmp_ordered(">", x, zero), _constant(1), found)
    raise NotImplementedError(f"no kernel for numpy.{ufunc.__name__} in a formula")


def _note(build: ir.IRBuilder, progress: ir.Value, word: int, value: ir.Value) -> None:
    """Set a word of the progress between barriers.

    A killed process has done all stores up to some instruction, so only the compiler must not
    reorder them; on x86 the barriers cost no instruction.
    """
    build.fence("release")
    build.store(value, build.gep(progress, [ir.Constant(_INT, word)]))
    build.fence("release")
