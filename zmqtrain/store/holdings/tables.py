"""The tables of a shard: rows that a change has gradients of, changed by their tables' rules.

What a change does to a table: the gradients' rows are added up by id; rows that are trained for the
first time get memory; then the rule runs over blocks of rows. A block is copied into the scratch,
side by side with its slots, so a rule sees what it sees of dense variables; then READY is noted,
the block is copied back, and DONE is noted. If the process is killed, the next one copies a block
that is ready once more, and goes on behind it: with the same bits, for what decides (the gradients,
the rows, the number of the update) is in memory that outlives the process.

On a board each member changes some tables, in a workspace of its own: see board_share.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from zmqtrain.models.tables import WHOLE, Ids, RowPlace, Rows, RowsOf, owned_by, shards_of
from zmqtrain.optim import Mean, Rule, Update
from zmqtrain.optim.formula import Numbers
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.merge import Term, merged
from zmqtrain.protocol.status import TableStatus
from zmqtrain.store.changes import UPDATE, Change
from zmqtrain.store.held_table import HeldTable, TableUpdate
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.manifest import Manifest
from zmqtrain.store.row_buffer import Contributed, RowSum
from zmqtrain.store.row_code import Training, train
from zmqtrain.store.table_checkpoint import FrozenTable, read_table
from zmqtrain.store.table_layout import BLOCK_ROWS, DONE, LINE, READY, position, position_of
from zmqtrain.store.table_memory import TableMemory


class Tables:
    """All tables of a shard. It is a Holding.

    ``updates``: one for each table, with the shard's ``clip_norm``. ``place``: the rows held.
    ``workspace``, ``numbers``: where it changes the tables of these numbers, while other tasks
    change the rest; None: all. ``ahead``: number of further gradients for whose new rows each
    change makes room, as long as there is memory.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        memory: TableMemory,
        place: RowPlace = WHOLE,
        *,
        workspace: int = 0,
        numbers: range | None = None,
        ahead: int = 0,
    ) -> None:
        """
        Raises:
            SegmentError: there is no room for the workspace.
        """
        self.memory, self.place = memory, place
        arena, layout = memory.arena, memory.layout
        self._numbers = range(len(updates)) if numbers is None else numbers
        self._ahead = ahead
        self._progress = memory.words[LINE * (1 + workspace) :][:LINE]
        self._progress_at = arena.address + layout.words.start + 8 * LINE * (1 + workspace)
        workspace_at = layout.scratch_at + workspace * layout.workspace_nbytes
        arena.reserve(workspace_at, layout.workspace_nbytes)
        self._scratch_places = arena.ints(workspace_at, BLOCK_ROWS)
        scratch = arena.floats(workspace_at + layout.places_nbytes, layout.scratch_size)
        self._tables = [
            HeldTable(layout.tables[number], update, memory, scratch)
            for number, update in enumerate(updates)
        ]
        self._sum = RowSum(arena, memory.words, layout)
        self._of: tuple[Change, list[TableUpdate]] | None = None
        self._prepared_for: Change | None = None

    def beside(self, workspace: int, numbers: range, ahead: int) -> Tables:
        """Return the same tables, to change those with these numbers beside others."""
        updates = [table.update for table in self._tables]
        return Tables(
            updates, self.memory, self.place, workspace=workspace, numbers=numbers, ahead=ahead
        )

    def has_room(self, table: int, rows: int) -> bool:
        """Return whether ``rows`` new rows of a table need no more memory."""
        return self._tables[table].has_room(rows)

    def use(self, before: Rule, now: Rule) -> None:
        """Update tables whose rule is ``before``, the job's, by another one with its slots."""
        for table in self._tables:
            if table.update.rule == before:
                table.bind(replace(table.update, rule=now))

    def sizes(self, rows: int) -> list[int]:
        """Return for each table the number of elements that ``rows`` rows and their slots have."""
        return [rows * sum(table.layout.widths) for table in self._tables]

    def check(self, step: int) -> None:
        """Check that the rules can make update ``step``.

        Raises:
            ConfigError: one of them cannot.
        """
        for bound in {id(table.update.rule): table.bound for table in self._tables}.values():
            bound.numbers(step)

    def begin_own(self) -> None:
        """Note that nothing of the next change of its tables is made."""
        self._progress[READY] = self._progress[DONE] = 0

    def begin(self, change: Change) -> None:
        if change.kind == UPDATE:
            self._prepared(change)
        else:
            self._sum.begin(self._given(change), goes_on=change.with_sum)
        self.begin_own()

    def square(self, change: Change) -> int:
        divisor, found = change.weight / change.unit, 0
        for share in self._shares(change):
            rows = share.rows
            if self.place.copies > 1:
                rows = rows[shards_of(share.ids, self.place.shards) == self.place.shard]
            found += share.table.bound.square(Mean([rows.reshape(-1)], divisor))
        return found

    def update(self, change: Change) -> None:
        divisor, step = change.weight / change.unit, change.step
        first, done = position_of(self._progress[DONE])
        shares = self._prepared(change)
        waiting: list[tuple[TableUpdate, Training]] = []  # for one call, which compiled code makes
        for share in shares:
            if share.number < first:
                continue
            share.admit(step + 1)
            share.mean = Mean([share.rows.reshape(-1)], divisor, clip=change.clip)
            begin = done if share.number == first else 0
            if (training := share.training(step, begin)) is not None:
                waiting.append((share, training))
                continue
            self._train_all(waiting)
            waiting.clear()
            self._train(share, step, begin)
        self._train_all(waiting)
        self._progress[READY] = self._progress[DONE] = position(len(self._tables), 0)
        for number in self._numbers:
            self._tables[number].forget(step + 1, self.place)
        for share in shares if self._ahead else ():
            share.table.make_room_ahead(self._ahead * len(share.ids))
        self._of = self._prepared_for = None

    def add(self, change: Change) -> None:
        self._sum.add(self._given(change))

    def repair(self, change: Change) -> None:
        progress = self._progress
        (first, done), (number, ready) = map(position_of, (progress[DONE], progress[READY]))
        if position(first, done) < position(number, ready) and number < len(self._tables):
            count = ready - done if number == first else ready
            self._tables[number].put(self._scratch_places[:count], change.step + 1)
            progress[DONE] = progress[READY]

    def repair_stores(self) -> None:
        """Finish the change of the rows' memory that a killed process left; no other changes it."""
        for number in self._numbers:
            self._tables[number].repair()

    def initialize(self) -> None:
        """Begin without trained rows."""
        for table in self._tables:
            table.clear()
        self._sum.clear()

    def freeze(self, layout: ShardLayout | None = None) -> list[FrozenTable]:
        """Return the tables as they are now, to be written into a checkpoint later.

        ``layout``: selects the rows that the shard writes; None: all.
        """
        slices = layout.rows if layout is not None else ()
        owners = [each.owner for each in slices if not each.copy]
        own = partial(owned_by, owners, self.place.shards) if slices else None
        return [FrozenTable(one.layout, one.store, one.candidates, own) for one in self._tables]

    def keep_frozen(self) -> None:
        """Copy what is frozen and not written yet, for other processes are to change rows."""
        if self.memory.arena.path is not None:
            for store in chain(self.memory.stores, self.memory.candidates.values()):
                store.keep_frozen()

    def read(self, path: Path, manifest: Manifest) -> Callable[[], None]:
        found = [read_table(path, manifest, table.layout, self.place) for table in self._tables]

        def take_over() -> None:
            self.initialize()
            for table, (rows, candidates) in zip(self._tables, found, strict=True):
                table.take_over(rows, candidates)

        return take_over

    def load(self) -> None:
        """Nothing is kept outside of the shard's memory."""

    def rows(self, table: int, ids: Ids) -> Rows:
        """Return the current rows with these ids, shape (n, dim)."""
        return self.memory.read(table, ids)

    def trained(self) -> Iterator[RowsOf]:
        """Yield the trained rows of each table."""
        for number, store in enumerate(self.memory.stores):
            ids = np.sort(store.ids(store.live()))
            yield RowsOf(number, ids, store.read(ids)[0])

    def status(self) -> dict[str, TableStatus]:
        """Return the status of each table, by its name."""
        return {table.variable.name: table.status() for table in self._tables}

    def _train(self, share: TableUpdate, step: int, start: int) -> None:
        """Update the rows of a table from number ``start`` on, block by block."""
        table, places, progress = share.table, share.places, self._progress
        length, dim = table.layout.block_rows, table.layout.variable.dim
        for begin in range(start, len(places), length):
            end = min(begin + length, len(places))
            own = places[begin:end]
            table.take(own, step)
            part = share.mean.at(slice(begin * dim, end * dim))
            table.bound.apply(part, step, numbers=share.numbers)
            self._scratch_places[: len(own)] = own
            progress[READY] = position(share.number, end)
            table.put(own, step + 1)
            progress[DONE] = position(share.number, end)

    def _train_all(self, waiting: Sequence[tuple[TableUpdate, Training]]) -> None:
        """Update the rows of tables whose rules are compiled."""
        with ExitStack() as changing:
            for share, _ in waiting:
                changing.enter_context(share.table.store.changing(share.places))
            every = [training for _, training in waiting]
            train(every, self._progress_at, address_of(self._scratch_places))

    def _prepared(self, change: Change) -> list[TableUpdate]:
        """Return what the change does to each table that it has rows of, and make room for it."""
        shares = self._shares(change)
        if self._prepared_for is not change:
            numbers: dict[int, list[Numbers]] = {}  # by rule, which most tables share
            for share in shares:
                rule = id(share.table.update.rule)
                if rule not in numbers:
                    numbers[rule] = share.table.bound.numbers(change.step)
                share.numbers = numbers[rule]
            for share in shares:
                share.find()
            self._prepared_for = change
        return shares

    def _shares(self, change: Change) -> list[TableUpdate]:
        """Return for each table the weighted sum of the rows of all that is averaged."""
        if self._of is not None and self._of[0] is change:
            return self._of[1]
        given = [*(self._sum.read() if change.with_sum else ()), *self._given(change)]
        terms: dict[int, list[Term]] = {}
        for parts, weight in given:
            for part in parts:
                if part.table in self._numbers:
                    places = self._tables[part.table].known(part)
                    term = Term(part.ids, part.rows, weight, places)
                    terms.setdefault(part.table, []).append(term)
        shares = [
            TableUpdate(number, self._tables[number], *merged(terms[number], len(given)))
            for number in sorted(terms)
        ]
        self._of = change, shares
        return shares

    def _given(self, change: Change) -> list[Contributed]:
        """Return the rows and the weight of each contribution."""
        return [
            (self.memory.buffer(given.buffer).read(), given.weight / change.unit)
            for given in change.contributions
        ]
