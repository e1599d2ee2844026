"""Reading rows of tables: in shared memory if the task has reached it, else by messages.

A model reads rows in a thread, which waits here for the messages; these are the event loop's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.actors.link import Link
from zmqtrain.errors import FencedError
from zmqtrain.models.rows import RowSource
from zmqtrain.models.tables import Ids, RowPlace, Rows, RowsOf, TableVariable, shards_of
from zmqtrain.store.table_memory import TableMemory
from zmqtrain.wire.compression import Compression
from zmqtrain.wire.messages import Lookup, RowValues
from zmqtrain.wire.rows import cut, encoded, rows_in

REQUESTS = 8  # requests for rows that a ps has at a time, each of about a frame: the others wait


class _Piece(NamedTuple):
    """Rows of one shard that are wanted."""

    place: int  # in the list of wanted rows
    where: NDArray[np.int64] | None  # their places there; None: all
    table: int
    ids: Ids

    def put(self, found: Sequence[Rows], run: slice, rows: Rows) -> None:
        """Put some of the rows, which were read, to their places."""
        found[self.place][run if self.where is None else self.where[run]] = rows


class _Asked(NamedTuple):
    """Rows that were asked for before they are read."""

    wanted: Sequence[tuple[int, Ids]]
    found: list[Rows]
    future: Future[None] | None  # None: no row travels

    def is_for(self, wanted: Sequence[tuple[int, Ids]]) -> bool:
        if len(wanted) != len(self.wanted):
            return False
        pairs = zip(wanted, self.wanted, strict=True)
        return all(a == b and (x is y or np.array_equal(x, y)) for (a, x), (b, y) in pairs)


class ShardRows(RowSource):
    """The rows of all shards."""

    def __init__(
        self,
        tables: Sequence[TableVariable],
        links: Sequence[Link],
        readers: Sequence[TableMemory | None],
        copies: int = 1,
        at: int = 0,
        compression: Compression | None = None,
    ) -> None:
        """``readers``: by shard, None: its rows travel. ``copies``: how many shards hold each row.
        ``at``: a version that all shards have kept, whose rows travel; 0: the current one.
        ``compression``: the job's, which may change rows that travel; None: they are exact.

        Made on the event loop of the links.
        """
        self._tables, self._links, self._readers, self._at = tables, links, readers, at
        self._compression = compression
        self._exact = None if compression is None else ShardRows(tables, links, readers, copies, at)
        self._sources = np.array([self._source(owner, copies) for owner in range(len(readers))])
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._turns = [asyncio.Semaphore(REQUESTS) for _ in links]
        self._under_way: set[Future[None]] = set()
        self._is_closed = False
        self._asked: _Asked | None = None

    @property
    def may_wait(self) -> bool:
        return None in self._readers

    def exact(self) -> ShardRows:
        return self._exact or self

    def read(self, wanted: Sequence[tuple[int, Ids]]) -> list[Rows]:
        if len(self._readers) == 1 and (reader := self._readers[0]) is not None:
            return [reader.read(table, ids) for table, ids in wanted]
        asked = self._asked
        if asked is not None and asked.is_for(wanted):
            self._asked = None
            _, found, future = asked
        else:
            found, future = self._begin(wanted)
        for piece, shard in self._pieces(wanted):
            if (reader := self._readers[shard]) is not None:
                piece.put(found, slice(None), reader.read(piece.table, piece.ids))
        if future is not None:
            self._wait_for(future)
        return found

    def ask(self, wanted: Sequence[tuple[int, Ids]], after: int) -> None:
        """Have the rows that travel sent with the answers to push ``after``, which has begun.

        The next :meth:`read` of the same rows takes them. Called on the links' event loop.
        """
        if self._asked is not None and self._asked.future is not None:
            self._asked.future.cancel()  # nobody has read them
            self._under_way.discard(self._asked.future)
        self._asked = _Asked(wanted, *self._begin(wanted, after)) if wanted else None

    def _begin(
        self, wanted: Sequence[tuple[int, Ids]], after: int = 0
    ) -> tuple[list[Rows], Future[None] | None]:
        """Return arrays for rows, and the future of those that travel; None: no row does."""
        found = [np.empty((len(i), self._tables[t].dim), np.float32) for t, i in wanted]
        far: dict[int, list[_Piece]] = {}
        for piece, shard in self._pieces(wanted):
            if self._readers[shard] is None:
                far.setdefault(shard, []).append(piece)
        if not far:
            return found, None
        future = asyncio.run_coroutine_threadsafe(self._fetch(far, found, after), self._loop)
        self._under_way.add(future)
        return found, future

    def close(self) -> None:
        self._is_closed = True
        if self._exact is not None:
            self._exact.close()
        for future in tuple(self._under_way):
            future.cancel()

    def _source(self, owner: int, copies: int) -> int:
        """Return the shard where the rows of this one are read: a near one, else their owner."""
        holders = [(owner + n) % len(self._readers) for n in range(copies)]
        return next((each for each in holders if self._readers[each] is not None), owner)

    def _pieces(self, wanted: Sequence[tuple[int, Ids]]) -> list[tuple[_Piece, int]]:
        shards = len(self._readers)
        if shards == 1:
            return [(_Piece(place, None, *each), 0) for place, each in enumerate(wanted)]
        found: list[tuple[_Piece, int]] = []
        for place, (table, ids) in enumerate(wanted):
            sources = self._sources[shards_of(ids, shards)]
            found += [
                (_Piece(place, where, table, ids[where]), shard)
                for shard in range(shards)
                if len(where := np.flatnonzero(sources == shard))
            ]
        return found

    def _wait_for(self, future: Future[None]) -> None:
        if threading.get_ident() == self._thread:
            future.cancel()
            raise RuntimeError("rows that travel are read in another thread than the event loop's")
        try:
            if self._is_closed:
                future.cancel()
                raise CancelledError
            future.result()
        except CancelledError:
            raise FencedError("this task ends, and reads no more rows") from None
        finally:
            self._under_way.discard(future)

    async def _fetch(self, far: dict[int, list[_Piece]], found: list[Rows], after: int) -> None:
        asked = []
        for shard, pieces in far.items():
            counts = [len(piece.ids) for piece in pieces]
            nbytes = [max(4 * self._tables[piece.table].dim, 8) for piece in pieces]
            for runs in cut(counts, nbytes):
                some = [(pieces[place], run) for place, run in runs]
                asked.append(self._ask(shard, some, found, after))
        await asyncio.gather(*asked)

    async def _ask(
        self, shard: int, some: Sequence[tuple[_Piece, slice]], found: list[Rows], after: int
    ) -> None:
        ids = [piece.ids[run] for piece, run in some]
        counts = tuple(map(len, ids))
        tables = tuple(piece.table for piece, _ in some)
        lookup = Lookup(tables, counts, after, self._at, self._compression is not None)
        reason = "it has not sent the rows of a batch yet"
        async with self._turns[shard]:
            link = self._links[shard]
            reply = await link.request(lookup, reason=reason, tensors=(encoded(ids),))
        compression = self._compression if reply.expect(RowValues).compressed else None
        dims = [self._tables[table].dim for table in tables]
        every = rows_in(reply.tensors, counts, dims, compression)
        for (piece, run), rows in zip(some, every, strict=True):
            piece.put(found, run, rows)


def by_shard(rows: Sequence[RowsOf], shards: int, copies: int = 1) -> list[list[RowsOf]]:
    """Return the rows that each shard holds, in the order of the tables."""
    if shards == copies:
        return [list(rows)] * shards
    found: list[list[RowsOf]] = [[] for _ in range(shards)]
    for each in rows:
        owners = shards_of(each.ids, shards)
        for shard in range(shards):
            if len(where := np.flatnonzero(RowPlace(shard, shards, copies).holds(owners))):
                found[shard].append(RowsOf(each.table, each.ids[where], each.rows[where]))
    return found
