"""Rows by id, in memory that other processes read while one changes it.

The rows lie in *records*, which never move; an *index* has their numbers (see row_code.py). The
index grows without a stop: a larger one is begun beside it, and with every change some entries of
the old one are entered in the new one, until the old one is given up. One word, STATE, says where
both are:

    bits 0-5    the capacity of the index is 2 to the power of this
    bit 6       which of two regions of this capacity it is
    bits 7-12   the same of the old index
    bit 13
    bit 14      whether there is an old one
    bits 15-62  how often this word was changed

A reader that does not find an id looks whether STATE is what it was, and else searches again. A
record that is free again has -1 in place of the update that trained it last; it is used again only
after SWEEPS has risen, so a reader that copied rows meanwhile copies them again.

A process may be killed anywhere: :meth:`RowStore.repair` finishes its work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import SegmentError
from zmqtrain.models.tables import Found, Ids, Places, Rows
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.store import words
from zmqtrain.store.arena import PAGE, Arena
from zmqtrain.store.row_code import ERASED, copy_code, index_code, read_code
from zmqtrain.store.row_snapshot import RowSnapshot
from zmqtrain.store.table_layout import (
    BLOCK_ROWS,
    COUNT,
    FORGOTTEN,
    FREE,
    LOAD,
    MOVED,
    NEXT_COUNT,
    NEXT_FREE,
    PENDING,
    PREPARED,
    PREPARED_BANK,
    PREPARED_BITS,
    RESERVED,
    STATE,
    SWEEPS,
    USED,
    StoreLayout,
)
from zmqtrain.units import counted

_FIRST_BITS = 13  # its 64 KiB are whole pages everywhere
_MOVED_AT_LEAST = 1 << 16  # words of the old index, with every change: less than a millisecond
_PREPARED_FROM = LOAD - 0.1  # share of an index that is used when memory of the next is reserved
_EXTENTS = 64 << 10, 8 << 20  # bytes of records reserved at once: at least, at most


class _State(NamedTuple):
    """The content of the word STATE; an index is (bits, bank)."""

    now: tuple[int, int]
    old: tuple[int, int] | None
    changes: int

    @classmethod
    def of(cls, word: int) -> _State:
        old = (word >> 7 & 63, word >> 13 & 1) if word >> 14 & 1 else None
        return cls((word & 63, word >> 6 & 1), old, word >> 15)

    @property
    def word(self) -> int:
        old = 0 if self.old is None else self.old[0] << 7 | self.old[1] << 13 | 1 << 14
        return self.now[0] | self.now[1] << 6 | old | self.changes << 15


class RowStore:
    """The rows of one table of a shard. One task changes it, any number read it."""

    def __init__(self, arena: Arena, layout: StoreLayout) -> None:
        self._arena, self.layout = arena, layout
        self.words = memoryview(arena.memory)[layout.words_at : layout.words_at + 8 * 64].cast("q")
        stride = layout.stride
        heads = arena.ints(layout.records_at, layout.most * stride // 8)
        self._heads = heads.reshape(-1, stride // 8)
        self._pending = arena.ints(layout.pending_at, BLOCK_ROWS)
        self._free = arena.ints(layout.free_at, layout.most)
        self._index, self._copy = index_code(), copy_code(stride, layout.widths)
        self._stride = stride
        self._records = arena.address + layout.records_at
        self._where = 0, (0, 0, 0, 0)  # STATE, and its addresses and masks
        self._snapshots: WeakSet[RowSnapshot] = WeakSet()  # those that are still read

    def __len__(self) -> int:
        """Return how many rows there are."""
        return self.words[COUNT] - self.words[FREE]

    @property
    def inserted(self) -> int:
        """Rows that were inserted so far."""
        return len(self) + self.words[FORGOTTEN]

    @property
    def nbytes(self) -> int:
        """Bytes of its records and its index."""
        return self.words[COUNT] * self.layout.stride + (8 << self._state.now[0])

    def find(self, ids: Ids) -> tuple[Places, int]:
        """Return the number of each id's record, or -1, and how many are -1."""
        ids, places = np.ascontiguousarray(ids), np.empty(len(ids), np.int64)
        found, given = address_of(places), (len(ids), address_of(ids))
        while True:
            word, where = self._index_now()
            missing = self._index.find(*given, *where, self._records, self._stride, found)
            if not missing or self.words[STATE] == word:
                return places, missing

    def read(self, ids: Ids) -> tuple[Rows, Found, int]:
        """Return the rows with these ids, where they are, and how many have no place.

        Without a place, which is -1 then, a row is arbitrary.
        """
        ids, places = np.ascontiguousarray(ids), np.empty(len(ids), np.int64)
        rows = np.empty((len(ids), self.layout.widths[0]), np.float32)
        given, found = (len(ids), address_of(ids)), (address_of(places), address_of(rows))
        while True:
            sweeps, (word, where) = self.words[SWEEPS], self._index_now()
            missing = self._reading(*given, *where, self._records, *found)
            is_same = self.words[SWEEPS] == sweeps
            if is_same and (not missing or self.words[STATE] == word):
                return rows, Found(sweeps, places), missing

    @cached_property
    def _reading(self) -> Any:
        return read_code(self._stride, self.layout.widths[0])

    def _index_now(self) -> tuple[int, tuple[int, int, int, int]]:
        """Return STATE, and addresses and masks of the index and the old one."""
        word = self.words[STATE]
        if word != self._where[0]:
            state = _State.of(word)
            old = self._region(state.old) if state.old else (0, 0)
            self._where = word, (*self._region(state.now), *old)
        return self._where

    def live(self) -> Places:
        """Return the places of all rows."""
        return np.flatnonzero(self._heads[: self.words[COUNT], 1] >= 0)

    def freeze(self, own: Callable[[Ids], NDArray[np.bool_]] | None = None) -> RowSnapshot:
        """Return the rows as they are now, for another thread to read as long as it keeps this.

        ``own``: selects some of these ids; None: all.
        """
        heads, rows = self._heads[: self.words[COUNT]], len(self)
        if own is not None:
            rows = int(np.count_nonzero(own(self.ids(self.live()))))
        snapshot = RowSnapshot(heads, rows, self.layout.widths, own)
        self._snapshots.add(snapshot)
        return snapshot

    def keep_frozen(self) -> None:
        """Let snapshots that are being read go on beside changes of other processes."""
        for snapshot in self._snapshots:
            snapshot.keep_all()

    def thaw(self) -> None:
        """End the snapshots that are being read."""
        for snapshot in self._snapshots:
            snapshot.close()

    def take_over(
        self, ids: Ids, stamps: NDArray[np.int64], parts: Sequence[NDArray[np.float32]]
    ) -> None:
        """Insert rows: sorted ids, second words, and (n, width) of each width."""
        self.make_room(len(ids))
        self.stamp(self.insert(ids, parts), stamps)

    def ids(self, places: Places) -> Ids:
        ids: Ids = self._heads[places, 0]
        return ids

    def stamps(self, places: Places) -> NDArray[np.int64]:
        """Return the second word of records."""
        stamps: NDArray[np.int64] = self._heads[places, 1]
        return stamps

    def stamp(self, places: Places, values: NDArray[np.int64]) -> None:
        with self.changing(places):
            self._heads[places, 1] = values

    def gather(self, places: Places, parts: Sequence[NDArray[np.float32]]) -> None:
        """Copy records into one array for each width."""
        given = address_of(places), self._records, *map(address_of, parts)
        self._copy.gather(len(places), *given)

    @property
    def copying(self) -> tuple[int, int, int]:
        """Addresses of the records, and of the code of :meth:`gather` and :meth:`scatter`."""
        return self._records, self._copy.gather.address, self._copy.scatter.address

    def scatter(self, places: Places, stamp: int, parts: Sequence[NDArray[np.float32]]) -> None:
        """Copy arrays into records, and set the second word of each."""
        given = address_of(places), self._records, stamp, *map(address_of, parts)
        with self.changing(places):
            self._copy.scatter(len(places), *given)

    def clear(self) -> None:
        """Forget all rows."""
        self.thaw()
        state, held = self._state, self.words[COUNT]
        self.words[COUNT] = self.words[FREE] = self.words[PENDING] = self.words[USED] = 0
        self.words[SWEEPS] += 1
        for index in filter(None, (state.now, state.old)):
            if index[0]:
                self._arena.release(self._begin(index), 8 << index[0])
        self._arena.release(self.layout.records_at, -(-held * self.layout.stride // PAGE) * PAGE)
        self.words[RESERVED] = self.words[PREPARED] = 0
        first = _FIRST_BITS, 0
        self._arena.reserve(self._begin(first), 8 << _FIRST_BITS)
        self._set(_State(first, None, state.changes + 1))

    def has_room(self, new: int) -> bool:
        """Return whether :meth:`make_room` would need no more memory for ``new`` rows."""
        new, capacity = min(new, self.layout.most - len(self)), 1 << self._state.now[0]
        records = self.words[COUNT] + max(new - self.words[FREE], 0)
        has_records = records * self.layout.stride <= self.words[RESERVED]
        return has_records and max(self.words[USED], len(self)) + new <= LOAD * capacity

    def make_room(self, new: int) -> None:
        """Prepare the insertion of ``new`` rows; readers notice nothing.

        Raises:
            SegmentError: there is no room.
        """
        if not new and not self.words[STATE] >> 14 & 1:  # there is no old index
            return
        layout, held = self.layout, self.words[COUNT]
        try:
            records = held + max(new - self.words[FREE], 0)
            if records > layout.most:
                raise SegmentError(f"there is room for {layout.most}")
            self._reserve(records)
            self._grow(new)
        except SegmentError as error:
            raise SegmentError(
                f"the table {layout.name!r} has {counted(held, 'row')} of {layout.stride} B and "
                f"would have {new} more: {error}; or give the job more ps, or the table max_rows "
                "or forget_after"
            ) from error

    def _reserve(self, rows: int) -> None:
        """Allocate memory for ``rows`` records, and some more."""
        needed, reserved = rows * self.layout.stride, self.words[RESERVED]
        if needed > reserved:
            extent = min(max(needed // 8, _EXTENTS[0]), _EXTENTS[1])
            stop = min(needed + extent, self.layout.most * self.layout.stride)
            self._arena.reserve(self.layout.records_at + reserved, stop - reserved)
            self.words[RESERVED] = stop

    def insert(self, ids: Ids, parts: Sequence[NDArray[np.float32]]) -> Places:
        """Insert rows that are not there, and for which there is room; return their places.

        ``parts``: for each width an array of shape (n, width).
        """
        places = np.empty(len(ids), np.int64)
        for start in range(0, len(ids), BLOCK_ROWS):
            own = slice(start, start + BLOCK_ROWS)
            places[own] = self._insert(ids[own], [part[own] for part in parts])
        return places

    def _insert(self, ids: Ids, parts: Sequence[NDArray[np.float32]]) -> Places:
        held, free = self.words[COUNT], self.words[FREE]
        again = min(free, len(ids))
        new = len(ids) - again
        places = np.concatenate([self._free[free - again : free], np.arange(held, held + new)])
        self.scatter(places, 0, parts)
        self._heads[places, 0] = ids
        self._pending[: len(ids)] = places
        self.words[NEXT_COUNT], self.words[NEXT_FREE] = held + new, free - again
        self.words[PENDING] = len(ids)
        self._enter()
        return places

    def _enter(self) -> None:
        """Enter the pending records into the index, or finish that."""
        places = self._pending[: self.words[PENDING]]
        self.words[COUNT], self.words[FREE] = self.words[NEXT_COUNT], self.words[NEXT_FREE]
        self.words[USED] += self._put(self.ids(places), places, self._state.now)
        self.words[PENDING] = 0

    def erase(self, places: Places) -> None:
        """Forget the rows in these places, or finish that; the places are free again."""
        ids, state = self.ids(places), self._state
        self.words[SWEEPS] += 1  # before an id is nowhere: who reads a snapshot looks at both
        for index in filter(None, (state.now, state.old)):
            self._put(ids, places, index, erase=True)
        with self.changing(places):
            self._heads[places, 1] = -1
        self.words[FORGOTTEN] += len(places)
        self._note_free(self.words[FREE], places)

    def _note_free(self, before: int, places: Places) -> None:
        """Append free records to the list, behind the first ``before`` of it."""
        free = before + len(places)
        self._arena.reserve(self.layout.free_at + 8 * before, 8 * len(places))
        self._free[before:free] = places
        self.words[SWEEPS] += 1
        self.words[FREE] = free

    def repair(self) -> None:
        """Finish the change that a killed process left."""
        state = self._state
        if self.words[PENDING]:
            self._enter()
        self._heads[self._free[: self.words[FREE]], 1] = -1
        self._note_free(0, np.flatnonzero(self._heads[: self.words[COUNT], 1] < 0))
        for index in product(range(_FIRST_BITS, state.now[0] + 2), (0, 1)):
            if index not in (state.now, state.old):
                self._arena.release(self._begin(index), 8 << index[0])
        self.words[PREPARED] = 0

    def _grow(self, new: int) -> None:
        """Make room in the index, and move entries of the old one."""
        state, rows = self._state, len(self)
        if max(self.words[USED], rows) + new > LOAD * (1 << state.now[0]):
            self._move(1 << 62)
            state = self._state
            bits = max((2 * (rows + new)).bit_length(), state.now[0])
            index = bits, 1 - state.now[1] if bits == state.now[0] else 0
            self._prepare(index, 8 << bits)
            self.words[USED] = self.words[MOVED] = 0
            self._set(_State(index, state.now, state.changes + 1))
        self._move(max(_MOVED_AT_LEAST, 4 * new))
        (bits, _), _, _ = self._state
        share = (self.words[USED] / (1 << bits) - _PREPARED_FROM) / (LOAD - _PREPARED_FROM - 0.02)
        with suppress(SegmentError):  # it is not needed yet
            self._prepare((bits + 1, 0), int(min(max(share, 0), 1) * (16 << bits)) // PAGE * PAGE)

    def _move(self, most: int) -> None:
        """Move the entries of at most ``most`` words of the old index."""
        state = self._state
        if state.old is None:
            return
        first, capacity = self.words[MOVED], 1 << state.old[0]
        last = min(first + most, capacity)
        old = self._arena.ints(self._begin(state.old) + 8 * first, last - first)
        entries = old[(old != 0) & (old != ERASED)]
        places = (entries & ERASED) - 1
        self.words[USED] += self._put(self.ids(places), places, state.now)
        self.words[MOVED] = last
        if last == capacity:
            self._set(_State(state.now, None, state.changes + 1))
            self._arena.release(self._begin(state.old), 8 << state.old[0])

    def _prepare(self, index: tuple[int, int], nbytes: int) -> None:
        """Reserve the first part of the next index; all at once would take too long."""
        own = self.words
        if (own[PREPARED_BITS], own[PREPARED_BANK]) != index:
            own[PREPARED] = 0
            own[PREPARED_BITS], own[PREPARED_BANK] = index
        before = own[PREPARED]
        if nbytes > before:
            self._arena.reserve(self._begin(index) + before, nbytes - before)
            own[PREPARED] = nbytes

    def changing(self, places: Places) -> AbstractContextManager[None]:
        """Keep the content of these records for all snapshots; enter it to change them."""
        return self._kept_first(places) if self._snapshots else nullcontext()

    @contextmanager
    def _kept_first(self, places: Places) -> Iterator[None]:
        with ExitStack() as changing:
            for snapshot in list(self._snapshots):
                changing.enter_context(snapshot.before_a_change(places))
            yield

    @property
    def _state(self) -> _State:
        return _State.of(self.words[STATE])

    def _set(self, state: _State) -> None:
        """Write the place of the index, after all that was written to it."""
        words.write(self._arena.address + self.layout.words_at + 8 * STATE, state.word)

    def _put(self, ids: Ids, places: Places, index: tuple[int, int], *, erase: bool = False) -> int:
        """Enter records into an index, or erase them; return how many entries are new."""
        given = address_of(ids), address_of(places), *self._region(index)
        return int(self._index.enter(len(ids), *given, erase))

    def _begin(self, index: tuple[int, int]) -> int:
        bits, bank = index
        return self.layout.index_at + (8 * (2 + bank) << bits)

    def _region(self, index: tuple[int, int]) -> tuple[int, int]:
        """Return the address and the mask of an index."""
        return self._arena.address + self._begin(index), (1 << index[0]) - 1
