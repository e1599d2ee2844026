"""The tables of a shard: rows that a change has gradients of, changed by their tables' rules.

What a change does to a table: the gradients' rows are added up by id; rows that are trained for the
first time get memory; then the rule runs over blocks of rows. A block is copied into the scratch,
side by side with its slots, so a rule sees what it sees of dense variables; then READY is noted,
the block is copied back, and DONE is noted. If the process is killed, the next one copies a block
that is ready once more, and goes on behind it: with the same bits, for what decides (the gradients,
the rows, the number of the update) is in memory that outlives the process.

The sum of a step is the list of its contributions, one behind the other.

On a board each member changes some tables, in a lane of its own: see board_share.py.

Rows are admitted by their counts, and forgotten by the number of the update that trained them last,
so a change that is made again, by another life or from a checkpoint, decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import SegmentError
from zmqtrain.models.tables import (
    MOST_COUNTED,
    WHOLE,
    Ids,
    RowPlace,
    Rows,
    RowsOf,
    TableVariable,
    owned_by,
    shards_of,
)
from zmqtrain.optim import Adam, AdamW, Flat, Mean, RowwiseAdagrad, Rule, Update
from zmqtrain.optim.formula import Numbers
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.random import initial_rows
from zmqtrain.optim.merge import Term, merged
from zmqtrain.protocol.status import TableStatus
from zmqtrain.store.changes import UPDATE, Change, float_of, word_of
from zmqtrain.store.hot_ids import HotIds
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.manifest import Manifest
from zmqtrain.store.row_buffer import get, nbytes_of, put
from zmqtrain.store.row_store import Places, RowStore
from zmqtrain.store.row_training import Training, train
from zmqtrain.store.table_checkpoint import FrozenTable, read_table
from zmqtrain.store.table_layout import (
    BLOCK_ROWS,
    DONE,
    FORGOTTEN,
    LINE,
    READY,
    SUM_BEFORE,
    SUM_END,
    UPDATED,
    TableLayout,
    position,
    position_of,
)
from zmqtrain.store.table_memory import TableMemory

_COUNTS = MOST_COUNTED - 1  # in a candidate's second word; above is the update that counted last
_WITH_HOT_IDS = 32  # tables whose hottest ids are told, for messages are limited
_SUM_HEAD = 64  # bytes before a contribution to the sum: bytes up to the next one, and its weight


class Tables:
    """All tables of a shard. It is a Holding.

    ``updates``: of each table, with the shard's ``clip_norm``. ``place``: which rows it holds.
    ``lane``, ``numbers``: where it changes which tables, beside others that change the rest; None:
    all. ``ahead``: each change makes room for the new rows of so many gradients more, as long as
    there is memory.
    """

    def __init__(
        self,
        variables: Sequence[TableVariable],
        updates: Sequence[Update],
        memory: TableMemory,
        place: RowPlace = WHOLE,
        *,
        lane: int = 0,
        numbers: range | None = None,
        ahead: int = 0,
    ) -> None:
        """
        Raises:
            SegmentError: there is no room for the lane.
        """
        self.memory, self.place = memory, place
        self._variables, self._arena, layout = variables, memory.arena, memory.layout
        self._numbers = range(len(variables)) if numbers is None else numbers
        self._ahead = ahead
        self._words, lane_at = memory.words, layout.scratch_at + lane * layout.lane_nbytes
        self._progress = memory.words[LINE * (1 + lane) :][:LINE]
        self._progress_at = self._arena.address + layout.words_at + 8 * LINE * (1 + lane)
        self._arena.reserve(lane_at, layout.lane_nbytes)
        self._scratch_places = self._arena.ints(lane_at, BLOCK_ROWS)
        scratch = self._arena.floats(lane_at + layout.places_nbytes, layout.scratch_size)
        self._tables = [
            _Table(layout.tables[number], update, memory, scratch)
            for number, update in enumerate(updates)
        ]
        self._dims = [variable.dim for variable in variables]
        self._of: tuple[Change, list[_Share]] | None = None

    def beside(self, lane: int, numbers: range, ahead: int) -> Tables:
        """Return the same tables, to change those with these numbers beside others."""
        given = self._variables, [table.update for table in self._tables], self.memory
        return Tables(*given, self.place, lane=lane, numbers=numbers, ahead=ahead)

    def has_room(self, table: int, rows: int) -> bool:
        """Say whether so many new rows of a table need no more memory."""
        return self._tables[table].has_room(rows)

    def use(self, before: Rule, now: Rule) -> None:
        """Update tables whose rule is ``before``, the job's, by another one with its slots."""
        for table in self._tables:
            if table.update.rule == before:
                table.bind(replace(table.update, rule=now))

    def sizes(self, rows: int) -> list[int]:
        """Return for each table how many elements so many rows and their slots have."""
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
        words = self._words
        if change.kind == UPDATE:
            self._prepared(change)
        else:
            before = words[SUM_END] if change.with_sum else 0
            given = self._given(change)
            nbytes = sum(_SUM_HEAD + nbytes_of(parts) + 64 for parts, _ in given)
            layout = self.memory.layout
            self._arena.reserve(layout.sum_at + before, nbytes)
            words[SUM_BEFORE] = before
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
        waiting: list[_Share] = []  # for one call, which compiled code makes
        for share in shares:
            if share.number < first:
                continue
            table, begin = share.table, done if share.number == first else 0
            places, rows = table.admitted(share, step + 1)
            table.note(share.ids)
            mean = Mean([rows.reshape(-1)], divisor, clip=change.clip)
            share.training = table.training(share, places, mean, step, begin)
            if share.training is not None:
                waiting.append(share)
                continue
            self._train_all(waiting)
            waiting.clear()
            self._train(share, places, mean, step, begin)
        self._train_all(waiting)
        self._progress[READY] = self._progress[DONE] = position(len(self._tables), 0)
        for number in self._numbers:
            self._tables[number].forget(step + 1, self.place)
        for share in shares if self._ahead else ():
            share.table.make_room_ahead(self._ahead * len(share.ids))
        self._of = None

    def add(self, change: Change) -> None:
        words, sum_at = self._words, self.memory.layout.sum_at
        at = words[SUM_BEFORE]
        for parts, weight in self._given(change):
            end = at + _SUM_HEAD + -(-nbytes_of(parts) // 64) * 64
            put(self._arena.memory, sum_at + at + _SUM_HEAD, parts)
            self._arena.ints(sum_at + at, 2)[:] = end, word_of(weight)
            at = end
        words[SUM_END] = at

    def repair(self, change: Change) -> None:
        progress = self._progress
        (first, done), (number, ready) = map(position_of, (progress[DONE], progress[READY]))
        if position(first, done) < position(number, ready) and number < len(self._tables):
            count = ready - done if number == first else ready
            self._tables[number].put(self._scratch_places[:count], change.step + 1)
            progress[DONE] = progress[READY]

    def repair_stores(self) -> None:
        """Finish what a killed process left of the rows' memory; no live one changes them."""
        for number in self._numbers:
            self._tables[number].repair()

    def initialize(self) -> None:
        """Begin without trained rows."""
        for table in self._tables:
            table.clear()
        self._words[SUM_END] = 0

    def freeze(self, layout: ShardLayout | None = None) -> list[FrozenTable]:
        """Return what a checkpoint has of the tables as they are now, to be written later.

        ``layout``: says whose rows the shard writes; None: all.
        """
        slices = layout.rows if layout is not None else ()
        owners = [each.owner for each in slices if not each.copy]
        own = partial(owned_by, owners, self.place.shards) if slices else None
        return [FrozenTable(one.layout, one.store, one.candidates, own) for one in self._tables]

    def keep_frozen(self) -> None:
        """Copy what is frozen and not written yet, for other processes are to change rows."""
        if self._arena.path is not None:
            for store in chain(self.memory.stores, self.memory.candidates.values()):
                store.keep_frozen()

    def read(self, path: Path, manifest: Manifest) -> Callable[[], None]:
        found = [read_table(path, manifest, table.layout, self.place) for table in self._tables]

        def take_over() -> None:
            self.initialize()
            for table, (rows, candidates) in zip(self._tables, found, strict=True):
                table.store.take_over(*rows)
                if table.candidates is not None and candidates is not None:
                    table.candidates.take_over(*candidates)

        return take_over

    def load(self) -> None:
        """Nothing is kept outside of the shard's memory."""

    def rows(self, table: int, ids: Ids) -> Rows:
        """Return the current rows with these ids, shape (n, dim)."""
        return self.memory.read(table, ids)

    def trained(self) -> Iterator[RowsOf]:
        """Yield the trained rows of each table."""
        for number, store in enumerate(self.memory.stores):
            places = store.live()
            ids = store.ids(places)
            order = np.argsort(ids)
            yield RowsOf(number, ids[order], store.read(ids[order])[0])

    def status(self) -> dict[str, TableStatus]:
        """Return what is to be told of each table, by its name."""
        return {table.variable.name: table.status() for table in self._tables}

    def _train(self, share: _Share, places: Places, mean: Mean, step: int, start: int) -> None:
        """Update the rows in these places from number ``start`` on, block by block."""
        table, progress = share.table, self._progress
        length, dim = table.layout.block_rows, table.layout.variable.dim
        for begin in range(start, len(places), length):
            end = min(begin + length, len(places))
            own = places[begin:end]
            table.take(own, step)
            part = mean.at(slice(begin * dim, end * dim))
            table.bound.apply(part, step, numbers=share.numbers)
            self._scratch_places[: len(own)] = own
            progress[READY] = position(share.number, end)
            table.put(own, step + 1)
            progress[DONE] = position(share.number, end)

    def _train_all(self, shares: Sequence[_Share]) -> None:
        """Update the rows of tables whose rules are compiled."""
        with ExitStack() as changing:
            for share in shares:
                changing.enter_context(share.table.store.changing(share.kept[0]))
            every = [share.training for share in shares if share.training is not None]
            train(every, self._progress_at, address_of(self._scratch_places))

    def _prepared(self, change: Change) -> list[_Share]:
        """Return what the change does to each table that it has rows of, and make room for it."""
        shares = self._shares(change)
        new = [share for share in shares if not share.is_found]
        numbers: dict[int, list[Numbers]] = {}  # by rule, which most tables share
        for share in new:
            rule = id(share.table.update.rule)
            if rule not in numbers:
                numbers[rule] = share.table.bound.numbers(change.step)
            share.numbers = numbers[rule]
        for share in new:
            share.places, share.missing = share.table.find(share.ids)
            share.is_found = True
        return shares

    def _given(self, change: Change) -> list[tuple[list[RowsOf], float]]:
        """Return the rows and the weight of each contribution."""
        return [
            (self.memory.buffer(given.buffer).read(), given.weight / change.unit)
            for given in change.contributions
        ]

    def _shares(self, change: Change) -> list[_Share]:
        """Return for each table the weighted sum of the rows of all that is averaged."""
        if self._of is not None and self._of[0] is change:
            return self._of[1]
        given = [*self._summed(), *self._given(change)] if change.with_sum else self._given(change)
        terms: dict[int, list[Term]] = {}
        for parts, weight in given:
            for part in parts:
                if part.table in self._numbers:
                    terms.setdefault(part.table, []).append(Term(part.ids, part.rows, weight))
        shares = [
            _Share(number, self._tables[number], *merged(terms[number], len(given)))
            for number in sorted(terms)
        ]
        self._of = change, shares
        return shares

    def _summed(self) -> list[tuple[list[RowsOf], float]]:
        """Return the contributions to the sum of the step."""
        found, at, sum_at = [], 0, self.memory.layout.sum_at
        while at < self._words[SUM_END]:
            end, weight = self._arena.ints(sum_at + at, 2).tolist()
            parts = get(self._arena.memory, sum_at + at + _SUM_HEAD, self._dims)
            found.append((parts, float_of(weight)))
            at = end
        return found


@dataclass(slots=True)
class _Share:
    """What a change does to one table: the sum of its rows, and where they are."""

    number: int
    table: _Table
    ids: Ids
    rows: Rows
    numbers: list[Numbers] = field(default_factory=list)
    is_found: bool = False  # whether there is room for the new rows, and the rest is known
    places: Places = field(default_factory=lambda: np.empty(0, np.int64))
    missing: int = 0  # number of new rows
    kept: tuple[Any, ...] = ()  # places and mean, which compiled code reads
    training: Training | None = None


class _Table:
    """One table, its rule, and where its blocks are in the scratch."""

    def __init__(
        self, layout: TableLayout, update: Update, memory: TableMemory, scratch: Flat
    ) -> None:
        variable = layout.variable
        self.layout, self.variable = layout, variable
        self.store: RowStore = memory.stores[variable.number]
        self.candidates = memory.candidates.get(variable.number)
        bounds = np.cumsum([0, *(layout.block_rows * width for width in layout.widths)]).tolist()
        self._parts = [scratch[a:b] for a, b in pairwise(bounds)]
        self._initial = [slot.initial or 0.0 for slot in layout.slots]
        self._hot = HotIds()
        self._full_at = -1  # at how many inserted rows an owner may have more than it keeps
        self.bind(update)

    def bind(self, update: Update) -> None:
        """Update by this rule from now on."""
        self.update, first = update, self._parts[0]
        slots = {s.name: part for s, part in zip(update.slots, self._parts[1:], strict=True)}
        if isinstance(update.rule, RowwiseAdagrad):
            update = replace(update, rule=update.rule.of_rows(self.variable.dim))
        self.bound = update.bind(first, slots)
        rule = update.rule
        self._catching_up = rule if isinstance(rule, Adam | AdamW) and rule.catch_up else None
        self._part_addresses = tuple(map(address_of, self._parts))

    @property
    def _stores(self) -> list[RowStore]:
        return [self.store] if self.candidates is None else [self.store, self.candidates]

    def clear(self) -> None:
        """Forget all rows."""
        self._full_at = -1
        for store in self._stores:
            store.clear()

    def has_room(self, new: int) -> bool:
        return all(store.has_room(new) for store in self._stores)

    def make_room_ahead(self, new: int) -> None:
        """Make room for so many new rows, and not more than there can be, if there is memory."""
        for store in self._stores:
            if not store.has_room(new):
                with suppress(SegmentError):  # it is not needed yet
                    store.make_room(min(new, store.layout.most - len(store)))

    def find(self, ids: Ids) -> tuple[Places, int]:
        """Return where the rows are, -1 for new ones, which there is room for from now on, and
        their number."""
        places, missing = self.store.find(ids)
        for store in self._stores:
            store.make_room(missing)
        return places, missing

    def admitted(self, share: _Share, version: int) -> tuple[Places, Rows]:
        """Return the places of the rows that are trained, and their gradient."""
        ids, rows, places = share.ids, share.rows, share.places
        if not share.missing:
            return places, rows
        missing = np.flatnonzero(places < 0)
        if self.candidates is None:
            places[missing] = self._inserted(ids[missing])
        else:
            counted, is_admitted = self._count(self.candidates, ids[missing], version)
            missing = missing[is_admitted]
            places[missing] = self._inserted(ids[missing])
            self.candidates.erase(counted[is_admitted])
        if len(missing) == share.missing:
            return places, rows
        trained = places >= 0
        return places[trained], rows[trained]

    def training(
        self, share: _Share, places: Places, mean: Mean, step: int, begin: int
    ) -> Training | None:
        """Return the update of the rows in these places; None: compiled code cannot make it."""
        call = self.bound.call(mean, step, share.numbers) if self._catching_up is None else None
        if call is None:
            return None
        share.kept = places, mean  # until it is made
        records, gather, scatter = self.store.copying
        return Training(
            len(places),
            begin,
            self.layout.block_rows,
            self.variable.dim,
            address_of(places),
            address_of(mean.gradients[0]),
            records,
            step + 1,
            position(share.number, 0),
            gather,
            call.code,
            scatter,
            self._part_addresses,
            *call[1:],
        )

    def _inserted(self, ids: Ids) -> Places:
        """Insert rows as they are before any training; return their places."""
        of, slots = self.variable, zip(self.layout.widths[1:], self._initial, strict=True)
        parts = [np.full((len(ids), width), value, np.float32) for width, value in slots]
        return self.store.insert(ids, [initial_rows(of.initial, of.key, ids, of.dim), *parts])

    def _count(
        self, candidates: RowStore, ids: Ids, version: int
    ) -> tuple[Places, NDArray[np.bool_]]:
        """Count a gradient of each of these ids, once in an update; return where they are counted,
        and which are admitted."""
        places, _ = candidates.find(ids)
        missing = np.flatnonzero(places < 0)
        places[missing] = candidates.insert(ids[missing], [])
        stamps = candidates.stamps(places)
        counts = (stamps & _COUNTS) + (stamps // MOST_COUNTED != version)
        candidates.stamp(places, version * MOST_COUNTED + np.minimum(counts, _COUNTS))
        return places, counts > self.variable.admit_after

    def forget(self, version: int, place: RowPlace) -> None:
        """Forget rows after an update, or finish that; each owner of rows keeps its own share."""
        variable, store = self.variable, self.store
        if (after := variable.forget_after) is not None and version % max(after // 4, 1) == 0:
            self._erase(store, store.live(), version - after)
            if self.candidates is not None:
                self._erase(self.candidates, self.candidates.live(), version - after)
        if variable.max_rows is not None and store.inserted > self._full_at:
            self._keep(-(-variable.max_rows // place.shards), place.shards)

    def _keep(self, most: int, shards: int) -> None:
        """Forget the oldest rows of each owner that has more than ``most``."""
        store, kept, most_held = self.store, most - most // 16, 0
        live = store.live()
        owners = shards_of(store.ids(live), shards)
        for owner in np.unique(owners):
            own = live[owners == owner]
            if len(own) > most:
                oldest = np.lexsort((store.ids(own), store.stamps(own)))
                store.erase(own[oldest[:-kept]])
            most_held = max(most_held, len(own) if len(own) <= most else kept)
        self._full_at = store.inserted + most - most_held

    def _erase(self, store: RowStore, live: Places, oldest: int) -> None:
        unit = 1 if store is self.store else MOST_COUNTED
        victims = live[store.stamps(live) // unit <= oldest]
        if len(victims):
            store.erase(victims)

    def repair(self) -> None:
        """Finish what a killed process left of the memory of rows."""
        for store in self._stores:
            store.repair()
        if self.candidates is not None:  # those that have rows are no candidates any more
            counted = self.candidates.live()
            places, _ = self.store.find(self.candidates.ids(counted))
            self.candidates.erase(counted[places >= 0])

    def note(self, ids: Ids) -> None:
        """Count the rows of an update, for people."""
        self.store.words[UPDATED] += len(ids)
        if self.variable.number < _WITH_HOT_IDS:
            self._hot.saw(ids)

    def status(self) -> TableStatus:
        variable, store, candidates = self.variable, self.store, self.candidates
        return TableStatus(
            rows=variable.rows,
            trained=len(store),
            nbytes=store.nbytes,
            max_rows=variable.max_rows,
            waiting=0 if candidates is None else len(candidates),
            updated=store.words[UPDATED],
            forgotten=store.words[FORGOTTEN],
            hottest=self._hot.hottest(),
        )

    def take(self, places: Places, step: int) -> None:
        """Copy rows and slots into the scratch, as they are before update ``step``."""
        self.store.gather(places, self._parts)
        if self._catching_up is not None:
            rule = self._catching_up
            stamps, names = self.store.stamps(places), ["", *(s.name for s in self.update.slots)]
            factors = rule.caught_up(np.where(stamps > 0, step - stamps, 0), step)
            for name, part in zip(names, self._parts, strict=True):
                if name in factors:
                    rows = part[: len(places) * self.variable.dim].reshape(len(places), -1)
                    rows *= factors[name][:, None]

    def put(self, places: Places, version: int) -> None:
        """Copy rows and slots from the scratch."""
        self.store.scatter(places, version, self._parts)
