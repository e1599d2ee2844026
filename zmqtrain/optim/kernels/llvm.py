"""Functions written in LLVM's language, and compiled for the processor that this process runs on.

Arrays have int64 or float32 elements, and are given by their addresses.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

INT, FLOAT, DOUBLE, VOID = ir.IntType(64), ir.FloatType(), ir.DoubleType(), ir.VoidType()
INTS, FLOATS, BYTES = (kind.as_pointer() for kind in (INT, FLOAT, ir.IntType(8)))
_IN_C: dict[ir.Type, Any] = {
    INT: ctypes.c_int64,
    FLOAT: ctypes.c_float,
    DOUBLE: ctypes.c_double,
    VOID: None,
}

_lock = threading.Lock()  # LLVM's context is global


def compiled(*functions: ir.Function) -> tuple[Any, ...]:
    """Compile functions of one module, to be called from Python without the GIL.

    Each has the ``address`` of its code, which it owns, and the ``module`` as LLVM optimised it.
    """
    module, engine = engine_of(functions[0].module)
    found = []
    for function in functions:
        kind, address = function.function_type, engine.get_function_address(function.name)
        types = [_IN_C.get(each, ctypes.c_void_p) for each in (kind.return_type, *kind.args)]
        call: Any = ctypes.CFUNCTYPE(*types)(address)
        call.address, call.module, call.engine = address, module, engine
        found.append(call)
    return tuple(found)


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


class Builder(ir.IRBuilder):  # type: ignore[misc]
    """Builds constructs that functions of this package use repeatedly."""

    def load_at(self, array: ir.Value, at: ir.Value) -> ir.Value:
        return self.load(self.gep(array, [at]))

    def store_at(self, array: ir.Value, at: ir.Value, value: ir.Value) -> None:
        self.store(value, self.gep(array, [at]))

    def lesser(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.select(self.icmp_signed("<", x, y), x, y)

    def raised(self, place: ir.Value, by: ir.Value) -> None:
        """Let a number in memory rise."""
        self.store(self.add(self.load(place), by), place)

    def note(self, words: ir.Value, word: int, value: ir.Value) -> None:
        """Set a word between barriers.

        A killed process has done all stores up to some instruction, so only the compiler must not
        reorder them; on x86 the barriers cost no instruction.
        """
        self.fence("release")
        self.store_at(words, const(word), value)
        self.fence("release")

    def prefetch(self, address: ir.Value) -> None:
        """Have the processor fetch what it will read there."""
        kind = ir.IntType(32)
        types = [BYTES, kind, kind, kind]
        found = self.module.globals.get("llvm.prefetch.p0")
        call = found or ir.Function(self.module, ir.FunctionType(VOID, types), "llvm.prefetch.p0")
        self.call(call, [self.bitcast(address, BYTES), *(ir.Constant(kind, n) for n in (0, 3, 1))])

    @contextmanager
    def counted(
        self, start: ir.Value, stop: ir.Value, step: int | ir.Value = 1
    ) -> Iterator[ir.Value]:
        """Repeat what is built in this context for each number from ``start`` to ``stop``."""
        before = self.block
        head, body, after = map(self.append_basic_block, ("head", "body", "after"))
        self.branch(head)
        self.position_at_end(head)
        at = self.phi(INT)
        at.add_incoming(start, before)
        self.cbranch(self.icmp_signed("<", at, stop), body, after)
        self.position_at_end(body)
        yield at
        by = const(step) if isinstance(step, int) else step
        at.add_incoming(self.add(at, by, flags=["nsw"]), self.block)
        self.branch(head)
        self.position_at_end(after)

    def copied(self, source: ir.Value, target: ir.Value, count: ir.Value) -> None:
        """Copy ``count`` elements of an array."""
        with self.counted(const(0), count) as i:
            self.store_at(target, i, self.load_at(source, i))


def const(value: int) -> ir.Constant:
    return ir.Constant(INT, value)


def begun(
    name: str,
    types: Sequence[ir.Type],
    result: ir.Type = VOID,
    *,
    module: ir.Module | None = None,
    disjoint: bool = False,
) -> tuple[Any, Builder]:
    """Return a new function, and a builder at its beginning.

    ``module``: its module; None: a new one. ``disjoint``: no two arrays overlap.
    """
    given = ir.Module() if module is None else module
    function = ir.Function(given, ir.FunctionType(result, types), name)
    for argument in function.args:
        if disjoint and argument.type.is_pointer:
            argument.add_attribute("noalias")
    return function, Builder(function.append_basic_block())


def repeated(name: str, one: ir.Function) -> ir.Function:
    """Return ``name(n, calls)`` beside a function that it calls with each row of an int64 array.

    Numbers for pointers are addresses.
    """
    function, build = begun(name, [INT, INTS], module=one.module)
    n, calls = function.args
    with build.counted(const(0), n) as i:
        row, given = build.gep(calls, [build.mul(i, const(len(one.args)))]), []
        for place, argument in enumerate(one.args):
            value = build.load_at(row, const(place))
            is_address = argument.type.is_pointer
            given.append(build.inttoptr(value, argument.type) if is_address else value)
        build.call(one, given)
    build.ret_void()
    return function
