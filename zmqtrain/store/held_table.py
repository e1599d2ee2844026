"""One table of a shard: where its rows are, which of them it trains and keeps, and by what rule.

Rows are admitted by their counts, and forgotten by the number of the update that trained them last,
so a change that is made again, by another life or from a checkpoint, decides the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import SegmentError
from zmqtrain.models.tables import MOST_COUNTED, Ids, Places, RowPlace, Rows, RowsOf, shards_of
from zmqtrain.optim import Adam, AdamW, Flat, Mean, RowwiseAdagrad, Update
from zmqtrain.optim.formula import Numbers
from zmqtrain.optim.kernels import Call
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.random import initial_rows
from zmqtrain.protocol.status import TableStatus
from zmqtrain.store.hot_ids import HotIds
from zmqtrain.store.row_code import Training
from zmqtrain.store.row_store import RowStore
from zmqtrain.store.table_checkpoint import HeldRows
from zmqtrain.store.table_layout import (
    COUNT,
    FORGOTTEN,
    SWEEPS,
    UPDATED,
    TableLayout,
    position,
)
from zmqtrain.store.table_memory import TableMemory

_COUNTS = MOST_COUNTED - 1  # in a candidate's second word; above is the update that counted last
_WITH_HOT_IDS = 32  # tables whose hottest ids are reported; messages are limited


class HeldTable:
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
        self.part_addresses = tuple(map(address_of, self._parts))

    @property
    def _stores(self) -> list[RowStore]:
        return [self.store] if self.candidates is None else [self.store, self.candidates]

    def take_over(self, rows: HeldRows, candidates: HeldRows | None) -> None:
        """Insert the rows of a checkpoint into an empty table."""
        self.store.take_over(*rows)
        if self.candidates is not None and candidates is not None:
            self.candidates.take_over(*candidates)

    def clear(self) -> None:
        """Forget all rows."""
        self._full_at = -1
        for store in self._stores:
            store.clear()

    def has_room(self, new: int) -> bool:
        return all(store.has_room(new) for store in self._stores)

    def make_room_ahead(self, new: int) -> None:
        """Make room for ``new`` rows, up to the most that are possible, if there is memory."""
        for store in self._stores:
            if not store.has_room(new):
                with suppress(SegmentError):  # it is not needed yet
                    store.make_room(min(new, store.layout.most - len(store)))

    def known(self, part: RowsOf) -> Places:
        """Return the places of rows that their sender knows and that are still right.

        They are -1 for the others.
        """
        found, words = part.found, self.store.words
        if found is not None and found.sweeps == words[SWEEPS] and len(part.ids):
            if found.places.max() < words[COUNT]:
                return found.places
        return np.full(len(part.ids), -1)

    def find(self, ids: Ids, known: Places) -> Places:
        """Return where the rows are, -1 for new ones, which there is room for from now on."""
        places, unknown = known.copy(), np.flatnonzero(known < 0)
        places[unknown], missing = self.store.find(ids[unknown])
        self.store.make_room(missing)
        if self.candidates is not None:
            self.candidates.make_room(self.candidates.find(ids[places < 0])[1])
        return places

    def insert(self, ids: Ids, version: int) -> Places:
        """Return the places of rows that are new, -1 for those that are not admitted yet."""
        if self.candidates is None:
            return self._inserted(ids)
        counted, is_admitted = self._count(self.candidates, ids, version)
        places = np.full(len(ids), -1)
        places[is_admitted] = self._inserted(ids[is_admitted])
        self.candidates.erase(counted[is_admitted])
        return places

    def call(self, mean: Mean, step: int, numbers: Sequence[Numbers]) -> Call | None:
        """Return the call of compiled code that is the rule; None: there is none."""
        return None if self._catching_up else self.bound.call(mean, step, numbers)

    def _inserted(self, ids: Ids) -> Places:
        """Insert rows as they are before any training; return their places."""
        of, slots = self.variable, zip(self.layout.widths[1:], self.layout.slots, strict=True)
        rows = initial_rows(of.initial, of.key, ids, of.dim)
        parts = [
            rows if slot.initial is None else np.full((len(ids), width), slot.initial, np.float32)
            for width, slot in slots
        ]
        return self.store.insert(ids, [rows, *parts])

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
        """Finish the change of the rows' memory that a killed process left."""
        for store in self._stores:
            store.repair()
        if self.candidates is not None:  # those that have rows are no longer candidates
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


@dataclass(slots=True)
class TableUpdate:
    """The part of an update that concerns one table: the sum of its rows, and their places."""

    number: int
    table: HeldTable
    ids: Ids
    rows: Rows
    places: Places  # -1: not known yet, or of a new row
    numbers: list[Numbers] = field(default_factory=list)
    mean: Mean = field(default_factory=lambda: Mean([]))

    def find(self) -> None:
        """Find the rows, and make room for new ones."""
        self.places = self.table.find(self.ids, self.places)

    def admit(self, version: int) -> None:
        """Insert new rows, and leave out those that are not admitted yet."""
        new = np.flatnonzero(self.places < 0)
        if len(new):
            self.places[new] = self.table.insert(self.ids[new], version)
            if (self.places[new] < 0).any():
                trained = self.places >= 0
                self.places, self.rows = self.places[trained], self.rows[trained]
        self.table.note(self.ids)

    def training(self, step: int, begin: int) -> Training | None:
        """Return the update by the mean from row ``begin`` on; None: compiled code cannot make it.

        It is of memory that this keeps.
        """
        table, (records, gather, scatter) = self.table, self.table.store.copying
        call = table.call(self.mean, step, self.numbers)
        return call and Training(
            rows=len(self.places),
            begin=begin,
            block=table.layout.block_rows,
            dim=table.variable.dim,
            places=address_of(self.places),
            gradient=address_of(self.mean.gradients[0]),
            records=records,
            stamp=step + 1,
            position=position(self.number, 0),
            gather=gather,
            update=call.code,
            scatter=scatter,
            parts=table.part_addresses,
            arrays=call.arrays,
            numbers=call.numbers,
        )
