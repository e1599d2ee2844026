"""From loops to machine code: ``python -m zmqtrain.optim.kernels.compiler SYMBOL``.

That writes a kernel's code to the standard output, sealed, and keeps it if that can be. No task
imports this: Numba and LLVM stay with a process that has nothing else to do.

A kernel gives the numbers of the NumPy rule exactly, on every processor and however the memory is
cut into runs. Numba's ``fastmath`` would void that, for nothing: beyond the cache a loop is bound
by the memory. ``error_model="numpy"`` spares it the exceptions from divisions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.extending import overload, register_jitable

from zmqtrain.optim.kernels import machine_code
from zmqtrain.optim.kernels.assembler import assemble, assembly_of
from zmqtrain.optim.kernels.loops import FORMULAS, loop_of, scaled_sum

_pointer: Any = types.CPointer

_FLAT = _pointer(types.float32)
_ARRAYS = _pointer(_FLAT)
_PROGRESS = _pointer(types.int64)
_RUN = (types.intp, types.intp)
_KERNEL = types.void(
    *(_ARRAYS, _ARRAYS, _PROGRESS, _FLAT, *_RUN, types.float32, types.float32, _FLAT)
)
_SCALED_SUM = types.void(_FLAT, _FLAT, _FLAT, types.float32, types.intp)


def code_of(symbol: str) -> bytes:
    """Return the code of ``scaled_sum``, or of a kernel as ``adam-1110[-guarded]``, and keep it."""
    with machine_code.turn():
        code = machine_code.kept(symbol)  # by who had the turn before
        if code is None:
            code = _compile_symbol(symbol)
            try:
                machine_code.keep(symbol, code)
            except (OSError, RuntimeError) as error:
                sys.stderr.write(f"it could not be kept: {error!r}")
    return code


def _compile_symbol(symbol: str) -> bytes:
    name, *rest = symbol.split("-")
    if rest:
        present = tuple(digit == "1" for digit in rest[0])
        return assemble(assembly_of(*compile_kernel(name, present, "guarded" in rest)))
    return assemble(assembly_of(*compile_scaled_sum()))


def compile_kernel(name: str, present: tuple[bool, ...], guarded: bool) -> tuple[str, str]:
    """Return LLVM IR of a kernel for the arrays that are ``present``, and its function's name.

    In C: ``void (float **arrays, float **areas, int64_t *progress, const float *gradient,
    intptr_t start, intptr_t stop, float share, float l2, const float *numbers)``. The tables have
    room for all arrays; the numbers are hyper-parameters and switches.
    """
    formula = FORMULAS[name]
    loop = register_jitable(loop_of(formula))
    # A formula's parameters are the parameter, the gradient, the slots, and then the numbers.
    last = list(inspect.signature(formula).parameters.values())[len(present) :]
    kinds = tuple(parameter.annotation == "bool" for parameter in last)

    # What Numba is to know when it compiles, it sees by the type: there or None, True or None.
    there, is_switch = _as_types(present), _as_types(kinds)

    def kernel(arrays, areas, progress, g, start, stop, share, l2, numbers):  # type: ignore[no-untyped-def]
        given = taken(arrays, 0, there), g, start, stop, share, l2, read(numbers, 0, is_switch)
        loop(*given, None, None)

    def guarded_kernel(arrays, areas, progress, g, start, stop, share, l2, numbers):  # type: ignore[no-untyped-def]
        given = taken(arrays, 0, there), g, start, stop, share, l2, read(numbers, 0, is_switch)
        loop(*given, taken(areas, 0, there), progress)

    return _compile(guarded_kernel if guarded else kernel, _KERNEL)


def compile_scaled_sum() -> tuple[str, str]:
    """Return LLVM IR of ``scaled_sum``, and its function's name.

    In C: ``void (float *out, const float *a, const float *b, float scale, intptr_t size)``.
    """
    return _compile(scaled_sum, _SCALED_SUM)


def _compile(function: Callable[..., None], signature: Any) -> tuple[str, str]:
    compiled: Any = numba.cfunc(signature, error_model="numpy")(function)
    return compiled.inspect_llvm(), compiled.native_name


def _as_types(flags: tuple[bool, ...]) -> tuple[bool | None, ...]:
    return tuple(flag or None for flag in flags)


# Only compiled code calls these two; below is what they are there.


def taken(table: Any, first: int, present: tuple[bool | None, ...]) -> tuple[Any, ...]:
    """Return the arrays of a table from ``first`` on, None for those that are not there."""
    raise NotImplementedError


def read(numbers: Any, first: int, is_switch: tuple[bool | None, ...]) -> tuple[Any, ...]:
    """Return the numbers from ``first`` on, switches as booleans."""
    raise NotImplementedError


# As in loops.py: Numba wants a function for the first item, which leaves the others to itself.


def _taken(table, first, present):  # type: ignore[no-untyped-def]
    if not len(present):
        return lambda table, first, present: ()
    if isinstance(present[0], types.NoneType):
        return lambda table, first, present: (None, *taken(table, first + 1, present[1:]))
    return lambda table, first, present: (table[first], *taken(table, first + 1, present[1:]))


def _read(numbers, first, is_switch):  # type: ignore[no-untyped-def]
    if not len(is_switch):
        return lambda numbers, first, is_switch: ()
    if isinstance(is_switch[0], types.NoneType):
        return lambda numbers, first, is_switch: (
            numbers[first],
            *read(numbers, first + 1, is_switch[1:]),
        )
    return lambda numbers, first, is_switch: (
        numbers[first] != 0,
        *read(numbers, first + 1, is_switch[1:]),
    )


overload(taken)(_taken)
overload(read)(_read)


if __name__ == "__main__":
    sys.stdout.buffer.write(machine_code.sealed(sys.argv[1], code_of(sys.argv[1])))
