"""The compiled loops over rows: find, enter and erase records of an index; copy rows.

An index is open addressing over words of 64 bits, a power of two of them. A word is 0 while it is
free; else its lower 40 bits are a record's number plus 1, and its upper 24 are those of the id's
hash, whose lower bits say where the search begins. So one store of a word publishes a record, and
other processes may search meanwhile: words are loaded by acquire and stored by release. ERASED
never becomes free again. A record begins with its id.

The loops run without the GIL. What they will read is prefetched, for nearly every row is a miss.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from zmqtrain.optim.kernels.loop import counted, engine_of
from zmqtrain.optim.kernels.random import mixed

HEADER = 2
"""Words of 64 bits before a record's elements: its id, and the update that trained it last."""

RECORD_BITS = 40
ERASED = (1 << RECORD_BITS) - 1

_INT, _BYTE, _FLOAT, _VOID = ir.IntType(64), ir.IntType(8), ir.FloatType(), ir.VoidType()
_INTS, _BYTES, _FLOATS = _INT.as_pointer(), _BYTE.as_pointer(), _FLOAT.as_pointer()
_CHUNK = 64  # ids whose memory is prefetched before the first of them is searched
_NEAR = 4  # words in which an entry is looked for, to prefetch its record
_AHEAD = 8  # records that are prefetched before they are copied
_LINE, _LINES = 64, 16  # bytes; lines of a record that are prefetched at most


class IndexCode(NamedTuple):
    """Addresses stand for arrays; a mask is a capacity less 1.

    ``find(n, ids, words, mask, old, old_mask, records, stride, out)`` writes the number of each
    id's record or -1, and returns how many have none; it searches ``old`` as well if that is not 0.
    ``enter(n, ids, places, words, mask, erase)`` enters records that are not entered yet, and
    returns how many it was; if ``erase`` is 1, it erases those that are entered.
    """

    find: Any
    enter: Any
    engine: Any  # the owner of their code


class ReadCode(NamedTuple):
    """``read(n, ids, words, mask, old, old_mask, records, out, rows)`` does what ``find`` of
    :class:`IndexCode` does, and copies the first elements of each record that it finds."""

    read: Any
    engine: Any


class CopyCode(NamedTuple):
    """Copying of records with parts of these widths, n of them.

    ``gather(n, places, records, *parts)`` copies records to one array for each part, and leaves out
    rows whose place is negative. ``scatter(n, places, records, stamp, *parts)`` copies them back,
    and sets the second word of each record to ``stamp``.
    """

    gather: Any
    scatter: Any
    addresses: tuple[int, int]  # of both
    engine: Any


@cache
def index_code() -> IndexCode:
    module = ir.Module()
    _build_find(module)
    _build_enter(module)
    _, engine = engine_of(module)
    number, place = ctypes.c_int64, ctypes.c_void_p

    def function(name: str, *types: Any) -> Any:
        return ctypes.CFUNCTYPE(number, *types)(engine.get_function_address(name))

    return IndexCode(
        function("find", number, place, place, number, place, number, place, number, place),
        function("enter", number, place, place, place, number, number),
        engine,
    )


@cache
def read_code(stride: int, dim: int) -> ReadCode:
    """Compile the reading of the first ``dim`` elements of records of ``stride`` bytes."""
    module = ir.Module()
    _build_find(module, (stride, dim))
    _, engine = engine_of(module)
    number, place = ctypes.c_int64, ctypes.c_void_p
    types = number, place, place, number, place, number, place, place, place
    return ReadCode(ctypes.CFUNCTYPE(number, *types)(engine.get_function_address("read")), engine)


@cache
def copy_code(stride: int, widths: tuple[int, ...]) -> CopyCode:
    """Compile the copying of records of ``stride`` bytes, whose parts follow the header."""
    module = ir.Module()
    for to_records in (False, True):
        _build_copy(module, stride, widths, to_records=to_records)
    _, engine = engine_of(module)
    number, place = ctypes.c_int64, ctypes.c_void_p
    parts = [place] * len(widths)
    gather = ctypes.CFUNCTYPE(None, number, place, place, *parts)
    scatter = ctypes.CFUNCTYPE(None, number, place, place, number, *parts)
    addresses = tuple(map(engine.get_function_address, ("gather", "scatter")))
    return CopyCode(gather(addresses[0]), scatter(addresses[1]), addresses, engine)


def _number(value: int) -> ir.Constant:
    return ir.Constant(_INT, value)


def _function(module: ir.Module, name: str, types: Sequence[ir.Type], result: ir.Type) -> Any:
    return ir.Function(module, ir.FunctionType(result, types), name)


def _lines_of(nbytes: int) -> list[int]:
    """Return offsets of which each line of a record has one, which begins anywhere."""
    return [*range(0, nbytes - 1, _LINE), nbytes - 1][:_LINES]


def _record(build: ir.IRBuilder, entry: ir.Value) -> ir.Value:
    """Return the number of an entry's record, -1 if it is 0."""
    return build.sub(build.and_(entry, _number(ERASED)), _number(1))


def _address(build: ir.IRBuilder, records: ir.Value, stride: ir.Value, at: ir.Value) -> ir.Value:
    return build.gep(records, [build.mul(at, stride)])


def _prefetch(build: ir.IRBuilder, address: ir.Value) -> None:
    kind = ir.IntType(32)
    types = [_BYTES, kind, kind, kind]
    found = build.module.globals.get("llvm.prefetch.p0")
    call = found or _function(build.module, "llvm.prefetch.p0", types, _VOID)
    build.call(call, [build.bitcast(address, _BYTES), *(ir.Constant(kind, n) for n in (0, 3, 1))])


@contextmanager
def _searched(build: ir.IRBuilder, words: Any, mask: Any, begin: Any) -> Any:
    """Repeat what is built in this context for (place, entry) until it leaves the loop.

    A branch to the third value goes on to the next place.
    """
    before = build.block
    head, on = build.append_basic_block("search"), build.append_basic_block("on")
    build.branch(head)
    build.position_at_end(head)
    place = build.phi(_INT)
    place.add_incoming(begin, before)
    yield place, build.load_atomic(build.gep(words, [place]), "acquire", 8), on
    build.position_at_end(on)
    following = build.and_(build.add(place, _number(1)), mask)
    place.add_incoming(following, on)
    build.branch(head)


def _build_probe(module: ir.Module) -> Any:
    """Build the search for the entry of an id in one index; it returns 0 if there is none."""
    function = _function(module, "probe", [_INTS, _INT, _INT, _BYTES, _INT], _INT)
    function.linkage = "internal"
    words, mask, id_, records, stride = function.args
    build = ir.IRBuilder(function.append_basic_block())
    used, check, none, end = map(function.append_basic_block, ("used", "check", "none", "end"))
    hash_ = mixed(build, id_)
    mark = build.lshr(hash_, _number(RECORD_BITS))
    with _searched(build, words, mask, build.and_(hash_, mask)) as (_, entry, on):
        build.cbranch(build.icmp_signed("==", entry, _number(0)), none, used)
        build.position_at_end(used)
        fits = build.icmp_signed("==", build.lshr(entry, _number(RECORD_BITS)), mark)
        is_there = build.icmp_signed("!=", entry, _number(ERASED))
        build.cbranch(build.and_(fits, is_there), check, on)
        build.position_at_end(check)
        head = build.bitcast(_address(build, records, stride, _record(build, entry)), _INTS)
        build.cbranch(build.icmp_signed("==", build.load(head), id_), end, on)
    for block, result in ((none, _number(0)), (end, entry)):
        build.position_at_end(block)
        build.ret(result)
    return function


def _build_find(module: ir.Module, row: tuple[int, int] | None = None) -> None:
    """Build the search for records; ``row``: bytes of one, and elements of it that are copied."""
    probe = _build_probe(module)
    before, after = ([_INT], []) if row is None else ([], [_FLOATS])
    types = [_INT, _INTS, _INTS, _INT, _INTS, _INT, _BYTES, *before, _INTS, *after]
    function = _function(module, "find" if row is None else "read", types, _INT)
    n, ids, words, mask, old, old_mask, records, *others = function.args
    stride, out = others if row is None else (_number(row[0]), others[0])
    ends = [0] if row is None else _lines_of(8 * HEADER + 4 * row[1])
    build = ir.IRBuilder(function.append_basic_block())
    build.fence("acquire")  # what the caller read before was read before
    missing, zero = build.alloca(_INT), _number(0)
    build.store(zero, missing)
    has_old = build.icmp_signed("!=", build.ptrtoint(old, _INT), zero)
    with counted(build, zero, n, _CHUNK) as begin:
        end = build.add(begin, _number(_CHUNK))
        end = build.select(build.icmp_signed("<", end, n), end, n)
        with counted(build, begin, end, 1) as i:
            hash_ = mixed(build, build.load(build.gep(ids, [i])))
            build.store(hash_, build.gep(out, [i]))
            _prefetch(build, build.gep(words, [build.and_(hash_, mask)]))
        with counted(build, begin, end, 1) as i:  # most entries are near where the search begins
            hash_, likely = build.load(build.gep(out, [i])), zero
            for step in range(_NEAR - 1, -1, -1):
                place = build.and_(build.add(hash_, _number(step)), mask)
                entry = build.load(build.gep(words, [place]))
                marks = build.lshr(build.xor(entry, hash_), _number(RECORD_BITS))
                likely = build.select(build.icmp_signed("==", marks, zero), entry, likely)
            record = _address(build, records, stride, _record(build, likely))
            for at in ends:
                _prefetch(build, build.gep(record, [_number(at)]))
        with counted(build, begin, end, 1) as i:
            id_, place = build.load(build.gep(ids, [i])), build.gep(out, [i])
            entry = build.call(probe, [words, mask, id_, records, stride])
            build.store(entry, place)
            is_free = build.icmp_signed("==", entry, zero)
            with build.if_then(build.and_(is_free, has_old)):
                build.store(build.call(probe, [old, old_mask, id_, records, stride]), place)
            record = _record(build, build.load(place))
            build.store(record, place)
            is_missing = build.icmp_signed("<", record, zero)
            build.store(build.add(build.load(missing), build.zext(is_missing, _INT)), missing)
            if row is not None:
                with build.if_then(build.not_(is_missing), likely=True):
                    head = _address(build, records, stride, record)
                    source = build.bitcast(build.gep(head, [_number(8 * HEADER)]), _FLOATS)
                    target = build.gep(others[1], [build.mul(i, _number(row[1]))])
                    _copy(build, source, target, row[1])
    if row is not None:
        build.fence("acq_rel")  # what is read after it was not read before
    build.ret(build.load(missing))


def _copy(build: ir.IRBuilder, source: ir.Value, target: ir.Value, width: int) -> None:
    with counted(build, _number(0), _number(width), 1) as j:
        build.store(build.load(build.gep(source, [j])), build.gep(target, [j]))


def _build_enter(module: ir.Module) -> None:
    function = _function(module, "enter", [_INT, _INTS, _INTS, _INTS, _INT, _INT], _INT)
    n, ids, places, words, mask, erase = function.args
    build = ir.IRBuilder(function.append_basic_block())
    total, zero = build.alloca(_INT), _number(0)
    build.store(zero, total)
    is_erased = build.icmp_signed("!=", erase, zero)
    with counted(build, zero, n, 1) as i:
        hash_ = mixed(build, build.load(build.gep(ids, [i])))
        mark = build.shl(build.lshr(hash_, _number(RECORD_BITS)), _number(RECORD_BITS))
        record = build.load(build.gep(places, [i]))
        entry = build.or_(mark, build.add(record, _number(1)))
        end = function.append_basic_block("end")
        with _searched(build, words, mask, build.and_(hash_, mask)) as (place, found, on):
            is_free = build.icmp_signed("==", found, zero)
            is_end = build.or_(is_free, build.icmp_signed("==", found, entry))
            build.cbranch(is_end, end, on)
        build.position_at_end(end)
        unless_free = build.select(is_free, zero, _number(ERASED))
        value = build.select(is_erased, unless_free, entry)
        build.store_atomic(value, build.gep(words, [place]), "release", 8)
        build.store(build.add(build.load(total), build.zext(is_free, _INT)), total)
    build.ret(build.load(total))


def _build_copy(
    module: ir.Module, stride: int, widths: tuple[int, ...], *, to_records: bool
) -> None:
    stamps = [_INT] * to_records
    types = [_INT, _INTS, _BYTES, *stamps, *([_FLOATS] * len(widths))]
    function = _function(module, "scatter" if to_records else "gather", types, _VOID)
    n, places, records, *others = function.args
    parts = others[len(stamps) :]
    for part in parts:
        part.add_attribute("noalias")
    build = ir.IRBuilder(function.append_basic_block())
    build.fence("acq_rel")  # what was written before is seen before
    last = build.sub(n, _number(1))
    with counted(build, _number(0), n, 1) as i:
        ahead = build.add(i, _number(_AHEAD))
        ahead = build.select(build.icmp_signed("<", ahead, last), ahead, last)
        following = _address(
            build, records, _number(stride), build.load(build.gep(places, [ahead]))
        )
        for at in _lines_of(stride):
            _prefetch(build, build.gep(following, [_number(at)]))
        place = build.load(build.gep(places, [i]))
        with build.if_then(build.icmp_signed(">=", place, _number(0)), likely=True):
            record = _address(build, records, _number(stride), place)
            if to_records:
                stamp = build.gep(build.bitcast(record, _INTS), [_number(1)])
                build.store(others[0], stamp)
            at = 8 * HEADER
            for part, width in zip(parts, widths, strict=True):
                inside = build.bitcast(build.gep(record, [_number(at)]), _FLOATS)
                outside = build.gep(part, [build.mul(i, _number(width))])
                source, target = (outside, inside) if to_records else (inside, outside)
                _copy(build, source, target, width)
                at += 4 * width
    build.fence("acq_rel")  # what is read after it was not read before
    build.ret_void()
