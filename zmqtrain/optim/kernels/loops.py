"""The loop over memory that Numba compiles for a formula.

Arithmetic is IEEE float32 in the order of the formula, as in NumPy: without ``fastmath``, LLVM
neither reorders operations nor fuses a product and a sum. To be fast the loop must vectorise, so it
has no conditional store: the types say at compile time which arrays there are, and whether the
update is crash-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic, overload, register_jitable

from zmqtrain.optim.formula import Formula, approach, element, moved
from zmqtrain.optim.redo import DONE, KERNEL_BLOCK, READY

register_jitable(approach)
register_jitable(element)


def loop_of(formula: Formula) -> Callable[..., None]:
    """Return the loop of a formula, to be compiled.

    It closes only over the formula, which Numba's cache can name in every process.
    """
    register_jitable(formula)

    def loop(arrays, g, start, numbers, factor, scale, l2, share, copies, progress):  # type: ignore[no-untyped-def]
        """Update ``arrays`` (parameters, slots, average; None: missing) from ``start`` on.

        ``g``: their gradient. With ``progress``, new values go to ``copies`` before they go to the
        arrays: see redo.py. The rest are the arguments of :func:`element`.
        """
        stop = start + len(g)
        length = len(g) if progress is None else KERNEL_BLOCK
        begin = start
        while begin < stop:
            end = min(begin + length, stop)
            old = cut(arrays, begin, end)
            new = old if progress is None else cut(copies, 0, end - begin)
            gradient = g[begin - start : end - start]
            for i in range(end - begin):
                now = at(old, i)
                put(
                    new,
                    i,
                    element(
                        formula,
                        now[0],
                        gradient[i],
                        now[1:-1],
                        now[-1],
                        numbers,
                        factor,
                        scale,
                        l2,
                        share,
                    ),
                )
            if progress is not None:
                in_order()
                progress[READY] = end
                in_order()
                for i in range(end - begin):
                    put(old, i, at(new, i))
                in_order()
                progress[DONE] = end
                in_order()
            begin = end

    return loop


def at(arrays: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    """Return the element of every array."""
    return tuple(None if array is None else array[i] for array in arrays)


def cut(arrays: tuple[Any, ...], start: int, stop: int) -> tuple[Any, ...]:
    """Return the elements from ``start`` to ``stop`` of every array."""
    return tuple(None if array is None else array[start:stop] for array in arrays)


def put(arrays: tuple[Any, ...], i: int, values: tuple[Any, ...]) -> None:
    """Set the element of every array."""
    for array, value in zip(arrays, values, strict=True):
        if array is not None:
            array[i] = value


def in_order() -> None:
    """A barrier: stores before it stay before stores after it.

    A killed process has done all stores up to some instruction, so only the compiler must not
    reorder them; on x86 this costs no instruction.
    """


# Numba's versions of these functions. Numba knows the type of each item of a tuple, so a function
# handles the first item and calls itself for the others. Numba does not accept annotations here.


@overload(at)
def _at(arrays, i):  # type: ignore[no-untyped-def]
    if not len(arrays):
        return lambda arrays, i: ()
    if isinstance(arrays[0], types.NoneType):
        return lambda arrays, i: (None, *at(arrays[1:], i))
    return lambda arrays, i: (arrays[0][i], *at(arrays[1:], i))


@overload(cut)
def _cut(arrays, start, stop):  # type: ignore[no-untyped-def]
    if not len(arrays):
        return lambda arrays, start, stop: ()
    if isinstance(arrays[0], types.NoneType):
        return lambda arrays, start, stop: (None, *cut(arrays[1:], start, stop))
    return lambda arrays, start, stop: (arrays[0][start:stop], *cut(arrays[1:], start, stop))


@overload(put)
def _put(arrays, i, values):  # type: ignore[no-untyped-def]
    if not len(arrays):
        return lambda arrays, i, values: None
    if isinstance(arrays[0], types.NoneType):
        return lambda arrays, i, values: put(arrays[1:], i, values[1:])

    def put_first(arrays, i, values):  # type: ignore[no-untyped-def]
        arrays[0][i] = values[0]
        put(arrays[1:], i, values[1:])

    return put_first


@overload(moved)
def _moved(average, target, share):  # type: ignore[no-untyped-def]
    if isinstance(average, types.NoneType):
        return lambda average, target, share: None
    return lambda average, target, share: approach(average, target, share)


@overload(in_order)
def _in_order() -> Callable[[], None]:
    def fence(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.fence("release")
            return context.get_dummy_value()

        return types.none(), generate

    emit: Any = intrinsic(fence)
    return lambda: emit()
