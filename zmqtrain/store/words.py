"""Words that several processes share: aligned int64 in mapped memory, changed atomically.

LLVM compiles four small functions, so that loads and stores keep their order on every processor,
those of Arm too: a load is an acquire, a store a release. What a process wrote before :func:`write`
or :func:`swap` is seen by every process that sees the new value by :func:`read`, :func:`swap` or
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

from zmqtrain.optim.kernels.llvm import INT, INTS, VOID, begun, compiled, const

_BOOL = ir.IntType(1)
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
    """Set the word at ``address`` if it is as expected; return whether it was."""
    return bool(_compiled().swap(address, expected, value))


def behind(address: int, count: int, stride: int, target: int) -> int:
    """Return which of ``count`` words, ``stride`` words apart, is below ``target``; -1: none is.

    If several are, an odd one, else the first.
    """
    return int(_compiled().behind(address, count, stride, target))


def wake(address: int) -> None:
    """Wake all threads that wait for a change of this word."""
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
    """Return whether this machine has them: LLVM may be broken."""
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


@cache
def _compiled() -> _Compiled:
    """Return the functions of this module as C functions."""
    module = ir.Module()
    return _Compiled(*compiled(_read(module), _write(module), _swap(module), _behind(module)))


def _read(module: ir.Module) -> Any:
    function, build = begun("read", [INTS], INT, module=module)
    build.ret(build.load_atomic(function.args[0], "acquire", 8))
    return function


def _write(module: ir.Module) -> Any:
    function, build = begun("write", [INTS, INT], VOID, module=module)
    build.store_atomic(function.args[1], function.args[0], "release", 8)
    build.ret_void()
    return function


def _swap(module: ir.Module) -> Any:
    function, build = begun("swap", [INTS, INT, INT], INT, module=module)
    result = build.cmpxchg(*function.args, "seq_cst", "seq_cst")
    build.ret(build.zext(build.extract_value(result, 1), INT))
    return function


def _behind(module: ir.Module) -> Any:
    """A loop over the words from the last to the first, which ends early at an odd one."""
    function, build = begun("behind", [INTS, INT, INT, INT], INT, module=module)
    words, count, stride, target = function.args
    begin = build.block
    head, body, odd, end = map(function.append_basic_block, ("head", "body", "odd", "end"))
    one, none = const(1), const(-1)
    last = build.sub(count, one)
    build.branch(head)
    build.position_at_end(head)
    place, late = build.phi(INT), build.phi(INT)
    build.cbranch(build.icmp_signed("<", place, const(0)), end, body)
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
    return function
