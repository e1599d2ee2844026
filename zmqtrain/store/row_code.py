"""The compiled loops over rows: find, enter and erase records of an index; copy and train rows.

An index is open addressing over words of 64 bits, a power of two of them. A word is 0 while it is
free; else its lower 40 bits are a record's number plus 1, and its upper 24 are those of the id's
hash, whose lower bits say where the search begins. So one store of a word publishes a record, and
other processes may search meanwhile: words are loaded by acquire and stored by release. ERASED
never becomes free again. A record begins with its id.

The training of rows by compiled rules is one call for many tables. For each block of a table's rows
it copies records into the scratch, updates them there, notes READY, copies them back, and notes
DONE, as ``Tables`` does for other rules.

The loops run without the GIL. What they will read is prefetched, for nearly every row is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.llvm import (
    BYTES,
    FLOATS,
    INT,
    INTS,
    VOID,
    Builder,
    begun,
    compiled,
    const,
)
from zmqtrain.optim.kernels.random import mixed
from zmqtrain.store.table_layout import DONE, HEADER, READY

RECORD_BITS = 40
ERASED = (1 << RECORD_BITS) - 1

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


class CopyCode(NamedTuple):
    """Copying of records with parts of some widths, n of them.

    ``gather(n, places, records, *parts)`` copies records to one array for each part, and leaves out
    rows whose place is negative. ``scatter(n, places, records, stamp, *parts)`` copies them back,
    and sets the second word of each record to ``stamp``.
    """

    gather: Any
    scatter: Any


@cache
def index_code() -> IndexCode:
    module = ir.Module()
    return IndexCode(*compiled(_find(module), _enter(module)))


@cache
def read_code(stride: int, dim: int) -> Any:
    """Return ``read(n, ids, words, mask, old, old_mask, records, out, rows)``, which does what
    ``find`` of :class:`IndexCode` does, and copies the first ``dim`` elements of each record, of
    ``stride`` bytes, that it finds."""
    (read,) = compiled(_find(ir.Module(), (stride, dim)))
    return read


@cache
def copy_code(stride: int, widths: tuple[int, ...]) -> CopyCode:
    """Compile the copying of records of ``stride`` bytes, whose parts follow the header."""
    module = ir.Module()
    functions = [_copy(module, stride, widths, to_records=each) for each in (False, True)]
    return CopyCode(*compiled(*functions))


def _lines_of(nbytes: int) -> list[int]:
    """Return offsets of which each line of a record has one, which begins anywhere."""
    return [*range(0, nbytes - 1, _LINE), nbytes - 1][:_LINES]


def _record(build: Builder, entry: ir.Value) -> ir.Value:
    """Return the number of an entry's record, -1 if it is 0."""
    return build.sub(build.and_(entry, const(ERASED)), const(1))


def _address(build: Builder, records: ir.Value, stride: ir.Value, at: ir.Value) -> ir.Value:
    return build.gep(records, [build.mul(at, stride)])


@contextmanager
def _searched(build: Builder, words: Any, mask: Any, begin: Any) -> Any:
    """Repeat the code that is built in this context for (place, entry) until it leaves the loop.

    A branch to the third value goes on to the next place.
    """
    before = build.block
    head, on = build.append_basic_block("search"), build.append_basic_block("on")
    build.branch(head)
    build.position_at_end(head)
    place = build.phi(INT)
    place.add_incoming(begin, before)
    yield place, build.load_atomic(build.gep(words, [place]), "acquire", 8), on
    build.position_at_end(on)
    following = build.and_(build.add(place, const(1)), mask)
    place.add_incoming(following, on)
    build.branch(head)


def _build_probe(module: ir.Module) -> Any:
    """Build the search for the entry of an id in one index; it returns 0 if there is none."""
    function, build = begun("probe", [INTS, INT, INT, BYTES, INT], INT, module=module)
    function.linkage = "internal"
    words, mask, id_, records, stride = function.args
    used, check, none, end = map(function.append_basic_block, ("used", "check", "none", "end"))
    hash_ = mixed(build, id_)
    mark = build.lshr(hash_, const(RECORD_BITS))
    with _searched(build, words, mask, build.and_(hash_, mask)) as (_, entry, on):
        build.cbranch(build.icmp_signed("==", entry, const(0)), none, used)
        build.position_at_end(used)
        fits = build.icmp_signed("==", build.lshr(entry, const(RECORD_BITS)), mark)
        is_there = build.icmp_signed("!=", entry, const(ERASED))
        build.cbranch(build.and_(fits, is_there), check, on)
        build.position_at_end(check)
        head = build.bitcast(_address(build, records, stride, _record(build, entry)), INTS)
        build.cbranch(build.icmp_signed("==", build.load(head), id_), end, on)
    for block, result in ((none, const(0)), (end, entry)):
        build.position_at_end(block)
        build.ret(result)
    return function


def _find(module: ir.Module, row: tuple[int, int] | None = None) -> Any:
    """Build the search for records; ``row``: bytes of one, and elements of it that are copied."""
    probe = _build_probe(module)
    before, after = ([INT], []) if row is None else ([], [FLOATS])
    types = [INT, INTS, INTS, INT, INTS, INT, BYTES, *before, INTS, *after]
    function, build = begun("find" if row is None else "read", types, INT, module=module)
    n, ids, words, mask, old, old_mask, records, *others = function.args
    stride, out = others if row is None else (const(row[0]), others[0])
    ends = [0] if row is None else _lines_of(8 * HEADER + 4 * row[1])
    build.fence("acquire")  # earlier reads of the caller stay before this
    missing, zero = build.alloca(INT), const(0)
    build.store(zero, missing)
    has_old = build.icmp_signed("!=", build.ptrtoint(old, INT), zero)
    with build.counted(zero, n, _CHUNK) as begin:
        end = build.lesser(build.add(begin, const(_CHUNK)), n)
        with build.counted(begin, end) as i:
            hash_ = mixed(build, build.load_at(ids, i))
            build.store_at(out, i, hash_)
            build.prefetch(build.gep(words, [build.and_(hash_, mask)]))
        with build.counted(begin, end) as i:  # most entries are near where the search begins
            hash_, likely = build.load_at(out, i), zero
            for step in range(_NEAR - 1, -1, -1):
                place = build.and_(build.add(hash_, const(step)), mask)
                entry = build.load_at(words, place)
                marks = build.lshr(build.xor(entry, hash_), const(RECORD_BITS))
                likely = build.select(build.icmp_signed("==", marks, zero), entry, likely)
            record = _address(build, records, stride, _record(build, likely))
            for at in ends:
                build.prefetch(build.gep(record, [const(at)]))
        with build.counted(begin, end) as i:
            id_, place = build.load_at(ids, i), build.gep(out, [i])
            entry = build.call(probe, [words, mask, id_, records, stride])
            build.store(entry, place)
            is_free = build.icmp_signed("==", entry, zero)
            with build.if_then(build.and_(is_free, has_old)):
                build.store(build.call(probe, [old, old_mask, id_, records, stride]), place)
            record = _record(build, build.load(place))
            build.store(record, place)
            is_missing = build.icmp_signed("<", record, zero)
            build.raised(missing, build.zext(is_missing, INT))
            if row is not None:
                with build.if_then(build.not_(is_missing), likely=True):
                    head = _address(build, records, stride, record)
                    source = build.bitcast(build.gep(head, [const(8 * HEADER)]), FLOATS)
                    target = build.gep(others[1], [build.mul(i, const(row[1]))])
                    build.copied(source, target, const(row[1]))
    if row is not None:
        build.fence("acq_rel")  # what is read after it was not read before
    build.ret(build.load(missing))
    return function


def _enter(module: ir.Module) -> Any:
    function, build = begun("enter", [INT, INTS, INTS, INTS, INT, INT], INT, module=module)
    n, ids, places, words, mask, erase = function.args
    total, zero = build.alloca(INT), const(0)
    build.store(zero, total)
    is_erased = build.icmp_signed("!=", erase, zero)
    with build.counted(zero, n) as i:
        hash_ = mixed(build, build.load_at(ids, i))
        mark = build.shl(build.lshr(hash_, const(RECORD_BITS)), const(RECORD_BITS))
        record = build.load_at(places, i)
        entry = build.or_(mark, build.add(record, const(1)))
        end = function.append_basic_block("end")
        with _searched(build, words, mask, build.and_(hash_, mask)) as (place, found, on):
            is_free = build.icmp_signed("==", found, zero)
            is_end = build.or_(is_free, build.icmp_signed("==", found, entry))
            build.cbranch(is_end, end, on)
        build.position_at_end(end)
        unless_free = build.select(is_free, zero, const(ERASED))
        value = build.select(is_erased, unless_free, entry)
        build.store_atomic(value, build.gep(words, [place]), "release", 8)
        build.raised(total, build.zext(is_free, INT))
    build.ret(build.load(total))
    return function


def _copy(module: ir.Module, stride: int, widths: tuple[int, ...], *, to_records: bool) -> Any:
    stamps = [INT] * to_records
    types = [INT, INTS, BYTES, *stamps, *([FLOATS] * len(widths))]
    function, build = begun("scatter" if to_records else "gather", types, module=module)
    n, places, records, *others = function.args
    parts = others[len(stamps) :]
    for part in parts:
        part.add_attribute("noalias")
    build.fence("acq_rel")  # earlier writes are visible before later ones
    last = build.sub(n, const(1))
    with build.counted(const(0), n) as i:
        ahead = build.lesser(build.add(i, const(_AHEAD)), last)
        following = _address(build, records, const(stride), build.load_at(places, ahead))
        for at in _lines_of(stride):
            build.prefetch(build.gep(following, [const(at)]))
        place = build.load_at(places, i)
        with build.if_then(build.icmp_signed(">=", place, const(0)), likely=True):
            record = _address(build, records, const(stride), place)
            if to_records:
                build.store_at(build.bitcast(record, INTS), const(1), others[0])
            at = 8 * HEADER
            for part, width in zip(parts, widths, strict=True):
                inside = build.bitcast(build.gep(record, [const(at)]), FLOATS)
                outside = build.gep(part, [build.mul(i, const(width))])
                source, target = (outside, inside) if to_records else (inside, outside)
                build.copied(source, target, const(width))
                at += 4 * width
    build.fence("acq_rel")  # what is read after it was not read before
    build.ret_void()
    return function


class Training(NamedTuple):
    """The rows of a table that are trained, and how. Addresses stand for arrays and functions."""

    rows: int
    begin: int  # rows that this change has trained before
    block: int  # rows in a block
    dim: int
    places: int
    gradient: int
    records: int
    stamp: int
    position: int  # the word for no row of this table
    gather: int
    update: int
    scatter: int
    parts: tuple[int, ...]  # of the scratch
    arrays: tuple[int, ...]  # those of the parts that the rule changes
    numbers: tuple[float, ...]  # the arguments of the update

    @property
    def kind(self) -> tuple[Any, ...]:
        """Those of one kind may share a call."""
        return len(self.parts), len(self.arrays), self.numbers


_FIXED = 12  # fields of a Training before the first tuple


def train(every: Sequence[Training], words: int, places: int) -> None:
    """Train rows of tables in this order.

    ``words``: address of the words of all tables; ``places``: of the scratch for numbers of
    records.
    """
    for (parts, arrays, numbers), some in groupby(every, key=lambda each: each.kind):
        rows = [(*each[:_FIXED], *each.parts, *each.arrays) for each in some]
        calls, given = np.array(rows, np.int64), np.array(numbers, np.float32)
        run = _compiled(parts, arrays, len(numbers))
        run(len(calls), address_of(calls), address_of(given), words, places)


@cache
def _compiled(parts: int, arrays: int, numbers: int) -> Any:
    """Return ``run(n, calls, numbers, words, places)``."""
    function, build = begun("run", [INT, INTS, FLOATS, INTS, INTS])
    n, calls, given, words, scratch = function.args
    numbers_in = [build.load_at(given, const(at)) for at in range(numbers)]
    width = _FIXED + parts + arrays
    with build.counted(const(0), n) as i:
        row = build.gep(calls, [build.mul(i, const(width))])
        fields = [build.load_at(row, const(at)) for at in range(width)]
        one = dict(zip(Training._fields, fields, strict=False))
        pointers = [build.inttoptr(field, FLOATS) for field in fields[_FIXED:]]
        own, own_arrays = pointers[:parts], pointers[parts:]
        places, gradient, records = (
            build.inttoptr(one[name], kind)
            for name, kind in (("places", INTS), ("gradient", FLOATS), ("records", BYTES))
        )
        with build.counted(one["begin"], one["rows"], one["block"]) as begin:
            end = build.lesser(build.add(begin, one["block"]), one["rows"])
            size, first = build.sub(end, begin), build.gep(places, [begin])
            elements = build.mul(size, one["dim"])
            its_gradient = build.gep(gradient, [build.mul(begin, one["dim"])])
            _call(build, one["gather"], size, first, records, *own)
            _call(build, one["update"], const(0), elements, its_gradient, *own_arrays, *numbers_in)
            build.copied(first, scratch, size)
            position = build.or_(one["position"], end)
            build.note(words, READY, position)
            _call(build, one["scatter"], size, first, records, one["stamp"], *own)
            build.note(words, DONE, position)
    build.ret_void()
    (run,) = compiled(function)
    return run


def _call(build: Builder, address: ir.Value, *given: ir.Value) -> None:
    kind = ir.FunctionType(VOID, [value.type for value in given])
    build.call(build.inttoptr(address, kind.as_pointer()), given)
