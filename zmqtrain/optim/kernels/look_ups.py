"""Look-ups of ids in tables, compiled by LLVM: all those of a step in one pass each.

Ids are sorted by radix, eight bits at a time, so that equal ids stay in their order. Hence sums of
equal ids are added up in the order of the batch, as those of a dense weight are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from zmqtrain.models.tables import Ids, Rows
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.llvm import (
    FLOAT,
    FLOATS,
    INT,
    INTS,
    Builder,
    begun,
    compiled,
    const,
    repeated,
)

_DIGIT = 11  # bits by which ids are sorted at once
_AHEAD = 8  # rows of a gradient that are prefetched before they are added

Column = tuple[int, int, int]
"""Ids in memory: the address of the first int64, how many there are, and elements between two."""


class LookUps:
    """Look-ups of several columns of ids. ``unique``: the sorted unique ids of each column."""

    def __init__(self, columns: Sequence[Column] | NDArray[np.int64]) -> None:
        """The memory of the columns is read here only."""
        given = np.ascontiguousarray(columns, np.int64).reshape(-1, 3)
        n, sizes = len(given), given[:, 1]
        begins, total = sizes.cumsum() - sizes, int(sizes.sum())
        unique, self._places, self._order = np.empty((3, total), np.int64)
        self._starts, counts = np.empty(total + n, np.int64), np.empty(n, np.int64)
        scratch = np.empty((2, int(sizes.max(initial=0))), np.int64)
        arrays = unique, self._places, self._order, self._starts, counts, scratch
        addresses = [address_of(array) for array in arrays]
        self._unique_at, self._places_at, self._order_at, self._starts_at = addresses[:4]
        calls = np.empty((n, 9), np.int64)
        calls[:, :3], calls[:, 3:] = given, addresses
        calls[:, 3:7] += 8 * begins[:, None]
        calls[:, 6:8] += 8 * np.arange(n)[:, None]
        _code().sort(n, address_of(calls))
        self._known = list(zip(begins.tolist(), sizes.tolist(), counts.tolist(), strict=True))
        self.unique: list[Ids] = [unique[at : at + count] for at, _, count in self._known]

    def size(self, number: int) -> int:
        """Return the number of a column's ids."""
        size: int = self._known[number][1]
        return size

    def places(self, number: int) -> NDArray[np.int64]:
        """Return for each id of a column its place among the unique ones."""
        begin, size, _ = self._known[number]
        return self._places[begin : begin + size]

    def is_of(self, number: int, column: Column) -> bool:
        """Return whether a column has the same ids as the one with this number."""
        begin, size, _ = self._known[number]
        if size != column[1]:
            return False
        at = 8 * begin
        address, _, stride = column
        known = self._unique_at + at, self._places_at + at
        return bool(_code().same(size, address, stride, *known))

    def expand(self, numbers: Sequence[int], rows: Sequence[Rows], out: Sequence[int]) -> None:
        """Write the row of each id of these columns.

        ``rows``: unique rows of each, contiguous; ``out``: addresses of arrays (ids, dim).
        """
        calls = []
        for number, own, target in zip(numbers, rows, out, strict=True):
            begin, size, _ = self._known[number]
            places = self._places_at + 8 * begin
            calls.append((size, own.shape[1], places, address_of(own), target))
        _run(_code().expand, calls)

    def add_up(self, gradients: Sequence[tuple[int, int, int, int]]) -> list[Rows]:
        """Return the gradients of columns' unique rows, each of shape (unique ids, dim).

        ``gradients``: (number, dim, address, elements from one row to the next) of the gradient of
        each id's row. Rows of equal ids are added to 0 in their order.
        """
        total = np.empty(sum(self._known[n][2] * dim for n, dim, *_ in gradients), np.float32)
        at, calls, found = 0, [], []
        for number, dim, address, stride in gradients:
            begin, _, count = self._known[number]
            starts, order = self._starts_at + 8 * (begin + number), self._order_at + 8 * begin
            out = address_of(total) + 4 * at
            calls.append((count, dim, starts, order, address, stride, out))
            found.append(total[at : at + count * dim].reshape(count, dim))
            at += count * dim
        _run(_code().add_up, calls)
        return found


def _run(function: Any, calls: Sequence[tuple[int, ...]]) -> None:
    given = np.array(calls, np.int64)  # which outlives the call
    function(len(calls), address_of(given))


class _Code(NamedTuple):
    """Compiled functions; all but ``same`` take a number of calls, and the address of their
    arguments: int64, one call behind the other."""

    same: Any
    sort: Any
    expand: Any
    add_up: Any


@cache
def _code() -> _Code:
    module = ir.Module()
    ones = {"sort": _column(module), "expand": _expanded(module), "add_up": _added_up(module)}
    return _Code(*compiled(_same(module), *(repeated(name, one) for name, one in ones.items())))


_ZERO, _ONE = const(0), const(1)


def _one(module: ir.Module, name: str, types: Sequence[ir.Type]) -> tuple[Any, Builder]:
    """Begin the function for one call."""
    function, build = begun(name, types, module=module, disjoint=True)
    function.linkage = "internal"
    return function, build


def _column(module: ir.Module) -> Any:
    """Build the sorting of one column.

    ``order`` becomes the positions of the ids, sorted by id; ``starts`` where in it each unique id
    begins, and the number of ids.
    """
    function, build = _one(module, "column", [INTS, INT, INT, *[INTS] * 6])
    ids, n, stride, unique, places, order, starts, counted_ids, scratch = function.args
    keys, other = scratch, build.gep(scratch, [n])
    counts = build.alloca(INT, const(1 << _DIGIT))
    least, most = build.alloca(INT), build.alloca(INT)
    source, target, shift = build.alloca(INTS), build.alloca(INTS), build.alloca(INT)
    build.store(const((1 << 63) - 1), least)
    build.store(const(-(1 << 63)), most)
    with build.counted(_ZERO, n) as i:
        id_ = build.load_at(ids, build.mul(i, stride))
        build.store_at(keys, i, id_)
        for bound, order_of in ((least, "<"), (most, ">")):
            before = build.load(bound)
            build.store(build.select(build.icmp_signed(order_of, id_, before), id_, before), bound)
    first = build.load(least)
    spread = build.sub(build.load(most), first)  # without a sign
    with build.counted(_ZERO, n) as i:
        build.store_at(keys, i, build.sub(build.load_at(keys, i), first))
        build.store_at(order, i, i)
    build.store(order, source)
    build.store(other, target)
    build.store(_ZERO, shift)
    head, body, after = map(function.append_basic_block, ("digit", "sort", "sorted"))
    build.branch(head)
    build.position_at_end(head)
    by = build.load(shift)
    is_left = build.icmp_unsigned(">", build.lshr(spread, by), _ZERO)
    build.cbranch(build.and_(build.icmp_signed("<", by, const(64)), is_left), body, after)
    build.position_at_end(body)
    _sort_by_digit(build, n, keys, by, counts, build.load(source), build.load(target))
    given, made = build.load(source), build.load(target)
    build.store(made, source)
    build.store(given, target)
    build.store(build.add(by, const(_DIGIT)), shift)
    build.branch(head)
    build.position_at_end(after)
    sorted_ = build.load(source)
    count, before = build.alloca(INT), build.alloca(INT)
    build.store(_ZERO, count)
    build.store_at(starts, _ZERO, _ZERO)
    with build.counted(_ZERO, n) as i:
        position = build.load_at(sorted_, i)
        key = build.load_at(keys, position)
        is_first = build.icmp_signed("==", i, _ZERO)
        is_new = build.or_(is_first, build.icmp_signed("!=", key, build.load(before)))
        build.store(key, before)
        known = build.add(build.load(count), build.zext(is_new, INT))
        build.store(known, count)
        place = build.sub(known, _ONE)
        build.store_at(unique, place, build.add(key, first))
        build.store_at(starts, known, build.add(i, _ONE))  # so far; a branch would take longer
        build.store_at(places, position, place)
        build.store_at(order, i, position)
    build.store(build.load(count), counted_ids)
    build.ret_void()
    return function


def _sort_by_digit(
    build: Builder,
    n: ir.Value,
    keys: ir.Value,
    shift: ir.Value,
    counts: ir.Value,
    source: ir.Value,
    target: ir.Value,
) -> None:
    """Build the sorting of positions by one digit of their keys."""

    def digit(position: ir.Value) -> ir.Value:
        key = build.lshr(build.load_at(keys, position), shift)
        return build.and_(key, const((1 << _DIGIT) - 1))

    size, total = const(1 << _DIGIT), build.alloca(INT)
    with build.counted(_ZERO, size) as i:
        build.store_at(counts, i, _ZERO)
    with build.counted(_ZERO, n) as i:
        at = digit(i)
        build.raised(build.gep(counts, [at]), _ONE)
    build.store(_ZERO, total)
    with build.counted(_ZERO, size) as i:
        before, own = build.load(total), build.load_at(counts, i)
        build.store_at(counts, i, before)
        build.store(build.add(before, own), total)
    with build.counted(_ZERO, n) as i:
        position = build.load_at(source, i)
        at = digit(position)
        place = build.load_at(counts, at)
        build.store_at(counts, at, build.add(place, _ONE))
        build.store_at(target, place, position)


def _same(module: ir.Module) -> Any:
    """Return ``same(n, ids, stride, unique, places)``: whether the ids are those of the places."""
    function, build = begun("same", [INT, INTS, INT, INTS, INTS], INT, module=module)
    n, ids, stride, unique, places = function.args
    different = build.alloca(INT)
    build.store(_ZERO, different)
    with build.counted(_ZERO, n) as i:
        id_ = build.load_at(ids, build.mul(i, stride))
        known = build.load_at(unique, build.load_at(places, i))
        build.store(build.or_(build.load(different), build.xor(id_, known)), different)
    build.ret(build.zext(build.icmp_signed("==", build.load(different), _ZERO), INT))
    return function


def _expanded(module: ir.Module) -> Any:
    """Build the copying of the row of each id of a column."""
    function, build = _one(module, "expanded", [INT, INT, INTS, FLOATS, FLOATS])
    n, dim, places, rows, out = function.args
    with build.counted(_ZERO, n) as i:
        row = build.gep(rows, [build.mul(build.load_at(places, i), dim)])
        build.copied(row, build.gep(out, [build.mul(i, dim)]), dim)
    build.ret_void()
    return function


def _added_up(module: ir.Module) -> Any:
    """Build the sum of the rows of equal ids of a column."""
    types = [INT, INT, INTS, INTS, FLOATS, INT, FLOATS]
    function, build = _one(module, "added_up", types)
    count, dim, starts, order, gradient, stride, total = function.args
    last = build.sub(build.load_at(starts, count), _ONE)
    with build.counted(_ZERO, count) as i:
        target = build.gep(total, [build.mul(i, dim)])
        begin, end = build.load_at(starts, i), build.load_at(starts, build.add(i, _ONE))

        def row(at: ir.Value) -> ir.Value:
            following = build.load_at(order, build.lesser(build.add(at, const(_AHEAD)), last))
            ahead = build.gep(gradient, [build.mul(following, stride)])
            build.prefetch(ahead)
            build.prefetch(build.gep(ahead, [build.sub(dim, _ONE)]))
            return build.gep(gradient, [build.mul(build.load_at(order, at), stride)])

        first = row(begin)
        with build.counted(_ZERO, dim) as j:  # 0 + -0 is 0
            build.store_at(target, j, build.fadd(ir.Constant(FLOAT, 0), build.load_at(first, j)))
        with build.counted(build.add(begin, _ONE), end) as at:
            other = row(at)
            with build.counted(_ZERO, dim) as j:
                both = build.fadd(build.load_at(target, j), build.load_at(other, j))
                build.store_at(target, j, both)
    build.ret_void()
    return function
