"""Words that several processes share: aligned int64 in mapped memory, changed atomically.

LLVM compiles four small functions, so that loads and stores keep their order on every processor,
those of Arm too: a load is an acquire, a store a release. What a process wrote before :func:`write`
or :func:`swap` is seen by whoever sees the new value by :func:`read`, :func:`swap` or
:func:`behind`. A wait is a futex on Linux, elsewhere a short sleep.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from zmqtrain.optim.kernels.loop import engine_of

_INT, _BOOL = ir.IntType(64), ir.IntType(1)
_WORDS = _INT.as_pointer()
_SYSCALLS = {"x86_64": 202, "aarch64": 98}  # number of futex
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_POLL_S = 0.0002  # where there is no futex


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def read(address: int) -> int:
    """Return the word at ``address``."""
    return int(_compiled().read(address))


def write(address: int, value: int) -> None:
    """Set the word at ``address``."""
    _compiled().write(address, value)


def swap(address: int, expected: int, value: int) -> bool:
    """Set the word at ``address`` if it is as expected; say whether it was."""
    return bool(_compiled().swap(address, expected, value))


def behind(address: int, count: int, stride: int, target: int) -> int:
    """Return which of ``count`` words, ``stride`` words apart, is below ``target``; -1: none is.

    If several are, an odd one, else the first.
    """
    return int(_compiled().behind(address, count, stride, target))


def wake(address: int) -> None:
    """Wake all who wait for a change of this word."""
    futex = _futex()
    if futex is not None:
        futex(address, _WAKE, _ALL, None)


def wait(address: int, value: int, limit_s: float) -> None:
    """Wait until the word has changed from this value, at most so long; it may be less."""
    futex = _futex()
    if futex is None:
        time.sleep(min(limit_s, _POLL_S))
        return
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    futex(address, _WAIT, value & 0xFFFFFFFF, ctypes.byref(limit))


@cache
def are_there() -> bool:
    """Say whether this machine has them: LLVM may be broken."""
    try:
        _compiled()
    except Exception:  # a compiler may raise anything
        return False
    return sys.byteorder == "little"  # a futex is the word's lower half, where it begins


@cache
def _futex() -> Callable[..., int] | None:
    number = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return None
    syscall = ctypes.CDLL(None).syscall

    def call(address: int, operation: int, value: int, limit: Any) -> int:
        word = ctypes.c_void_p(address)
        result: int = syscall(number, word, operation, ctypes.c_uint32(value), limit, None, 0)
        return result

    return call


class _Compiled(NamedTuple):
    read: Any
    write: Any
    swap: Any
    behind: Any
    engine: Any  # the owner of their code


@cache
def _compiled() -> _Compiled:
    """Return the functions of this module as C functions."""
    module = ir.Module()
    for build in (_build_read, _build_write, _build_swap, _build_behind):
        build(module)
    _, engine = engine_of(module)
    number, word = ctypes.c_int64, ctypes.c_void_p

    def function(name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, word, *arguments)(engine.get_function_address(name))

    return _Compiled(
        function("read", number),
        function("write", None, number),
        function("swap", number, number, number),
        function("behind", number, number, number, number),
        engine,
    )


def _build_read(module: ir.Module) -> None:
    function = ir.Function(module, ir.FunctionType(_INT, [_WORDS]), "read")
    build = ir.IRBuilder(function.append_basic_block())
    build.ret(build.load_atomic(function.args[0], "acquire", 8))


def _build_write(module: ir.Module) -> None:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORDS, _INT]), "write")
    build = ir.IRBuilder(function.append_basic_block())
    build.store_atomic(function.args[1], function.args[0], "release", 8)
    build.ret_void()


def _build_swap(module: ir.Module) -> None:
    function = ir.Function(module, ir.FunctionType(_INT, [_WORDS, _INT, _INT]), "swap")
    build = ir.IRBuilder(function.append_basic_block())
    result = build.cmpxchg(*function.args, "seq_cst", "seq_cst")
    build.ret(build.zext(build.extract_value(result, 1), _INT))


def _build_behind(module: ir.Module) -> None:
    """A loop over the words from the last to the first, which ends early at an odd one."""
    function = ir.Function(module, ir.FunctionType(_INT, [_WORDS, _INT, _INT, _INT]), "behind")
    words, count, stride, target = function.args
    begin, head, body, odd, end = (
        function.append_basic_block(name) for name in ("begin", "head", "body", "odd", "end")
    )
    build = ir.IRBuilder(begin)
    one, none = ir.Constant(_INT, 1), ir.Constant(_INT, -1)
    last = build.sub(count, one)
    build.branch(head)
    build.position_at_end(head)
    place, late = build.phi(_INT), build.phi(_INT)
    build.cbranch(build.icmp_signed("<", place, ir.Constant(_INT, 0)), end, body)
    build.position_at_end(body)
    value = build.load_atomic(build.gep(words, [build.mul(place, stride)]), "acquire", 8)
    is_late = build.icmp_signed("<", value, target)
    now_late, following = build.select(is_late, place, late), build.sub(place, one)
    build.cbranch(build.and_(is_late, build.trunc(value, _BOOL)), odd, head)
    for phi, first, next_ in ((place, last, following), (late, none, now_late)):
        phi.add_incoming(first, begin)
        phi.add_incoming(next_, body)
    build.position_at_end(odd)
    build.ret(place)
    build.position_at_end(end)
    build.ret(late)
