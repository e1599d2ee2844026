"""The regions of the memory of a shard's tables, described here alone.

They are in one sparse file (see arena.py), each from a page boundary on:

    header      magic, layout version, space, digest of the tables
    words       of all tables together, and of each workspace, named below
    scratch     for each workspace, new values of a block of rows: see holdings/tables.py
    sum         contributions that are added up for a step, one after the other
    stores      for each table its words; pending and free records; records; index

A second store of a table, of ids and counts alone, has the ids that are not admitted yet.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from zmqtrain.models.tables import TableVariable
from zmqtrain.optim import Slot, Update
from zmqtrain.store.arena import PAGE

LAYOUT_VERSION = 3  # rises with every change to these regions, and to the row buffers
MAGIC = b"zmqtable"
FIXED = struct.Struct("<8sQQ16s")  # magic, layout version, space, digest

HEADER = 2  # words of 64 bits before a record's elements: its id, and its last update

WORKSPACES = 8
"""Tasks that change tables side by side, at most, each some tables and in a workspace of its own.

A ps changes all of them in workspace 0; members of a board have one each (see board_share.py).
"""

(
    SUM_BEFORE,  # bytes of the sum before this change
    SUM_END,  # bytes of the sum
) = range(2)

(
    DONE,  # of a workspace: table and rows that have the new values of this change: see position
    READY,  # of a workspace: table and rows whose new values are in the scratch
) = range(2)

LINE = 8  # words in a line of the cache: those of all tables have one, and those of each workspace

(
    STATE,  # where the index is: see row_store.py
    USED,  # words of the index that are no longer free
    MOVED,  # words of the old index that were moved
    COUNT,  # records that were ever used
    FREE,  # of these, records that are free again
    PENDING,  # records that are written and not yet all entered
    NEXT_COUNT,  # COUNT and FREE once they are
    NEXT_FREE,
    SWEEPS,  # rises before and after rows are forgotten
    RESERVED,  # bytes of records that have memory
    PREPARED,  # bytes of the next index that have memory
    PREPARED_BITS,  # its capacity is 2 to the power of it
    PREPARED_BANK,  # which of two regions it is
    UPDATED,  # rows in updates so far, for people
    FORGOTTEN,  # rows that were erased so far, for people
) = range(15)

BLOCK_ROWS = 4096  # rows that are inserted, or changed, at once, at most
BLOCK_SIZE = 32_768  # elements of rows that are changed at once, if these are more than one row
LOAD = 0.7  # share of an index that is used before it grows
_ADDRESSES = 1 << 44  # bytes that a process maps of a shard, at most, most of which take no memory


@dataclass(frozen=True)
class TableLayout:
    """A table, and the slots of its rule."""

    variable: TableVariable
    slots: tuple[Slot, ...] = ()

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a row, and of each slot of a row."""
        dim = self.variable.dim
        return (dim, *(1 if slot.by_row else dim for slot in self.slots))

    @property
    def block_rows(self) -> int:
        """Rows that are changed at once."""
        return min(max(BLOCK_SIZE // self.variable.dim, 1), BLOCK_ROWS)


def table_layouts(
    variables: Sequence[TableVariable], updates: Sequence[Update]
) -> tuple[TableLayout, ...]:
    """Return the layouts of tables that these updates train."""
    pairs = zip(variables, updates, strict=True)
    return tuple(TableLayout(variable, update.slots) for variable, update in pairs)


class StoreLayout:
    """The place of one store of rows, in bytes from the beginning of the file.

    ``most``: rows that it has room for. Attributes ``stride``: bytes of a record; ``index_bits``:
    the capacity of the largest index is 2 to the power of it.
    """

    def __init__(self, name: str, widths: tuple[int, ...], most: int, words_at: int) -> None:
        self.name, self.widths, self.most, self.words_at = name, widths, most, words_at
        self.stride = 8 * HEADER + -(-4 * sum(widths) // 8) * 8
        self.index_bits = max((2 * most).bit_length(), 14)
        self.pending_at = words_at + PAGE
        self.free_at = self.pending_at + _pages(8 * BLOCK_ROWS)
        self.records_at = self.free_at + _pages(8 * most)
        self.index_at = self.records_at + _pages(self.stride * most)
        self.end = self.index_at + _pages(4 * 8 << self.index_bits)


class MemoryLayout:
    """The places of all regions; ``space``: the largest size of the file in bytes."""

    words = slice(PAGE, PAGE + 8 * LINE * (1 + WORKSPACES))

    def __init__(self, tables: Sequence[TableLayout], space: int) -> None:
        self.tables = tuple(tables)
        self.space = space
        self.scratch_at = 2 * PAGE
        self.scratch_size = max((t.block_rows * sum(t.widths) for t in tables), default=0)
        self.places_nbytes = 8 * BLOCK_ROWS
        self.workspace_nbytes = _pages(self.places_nbytes + 4 * self.scratch_size)
        self.sum_at = self.scratch_at + WORKSPACES * self.workspace_nbytes
        self.sum_nbytes = min(space, _ADDRESSES >> 3) // PAGE * PAGE
        at, share = self.sum_at + self.sum_nbytes, (_ADDRESSES >> 3) // max(len(tables), 1)
        self.stores: list[StoreLayout] = []
        self.candidates: dict[int, StoreLayout] = {}
        for number, table in enumerate(tables):
            name, rows = table.variable.name, table.variable.rows
            self.stores.append(_store(name, table.widths, rows, at, min(share, space)))
            at = self.stores[-1].end
            if table.variable.admit_after:
                self.candidates[number] = _store(name, (), rows, at, min(share, space))
                at = self.candidates[number].end
        self.nbytes = at

    @property
    def digest(self) -> bytes:
        """The same in every process for the same tables."""
        known = [(t.variable, t.slots) for t in self.tables]
        return blake2b(repr(known).encode(), digest_size=16).digest()


def position(table: int, rows: int) -> int:
    """Return the word for this number of rows of a table, after all rows of earlier tables."""
    return table << 40 | rows


def position_of(word: int) -> tuple[int, int]:
    """Return the table and its rows of a :func:`position`."""
    return word >> 40, word & (1 << 40) - 1


def _store(
    name: str, widths: tuple[int, ...], rows: int | None, at: int, nbytes: int
) -> StoreLayout:
    most = nbytes // StoreLayout(name, widths, 0, 0).stride
    return StoreLayout(name, widths, most if rows is None else min(most, rows), at)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
