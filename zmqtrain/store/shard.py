"""A shard: one ps's part of the model, and the changes of it.

All arithmetic on parameters happens below here. It carries out the policy's orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from zmqtrain.compute.arrays import Flat
from zmqtrain.compute.device import Device
from zmqtrain.errors import CheckpointError, ConfigError, SegmentError
from zmqtrain.optim import AVERAGE, Update
from zmqtrain.optim.norm import clip_scale
from zmqtrain.optim.schedules import Replaceable, has_rate
from zmqtrain.protocol.orders import Accumulate, Apply, Order, Rate, Reduce
from zmqtrain.protocol.status import Moves, TableStatus
from zmqtrain.store import checkpoint
from zmqtrain.store.changes import (
    ACCUMULATE,
    UPDATE,
    Change,
    Contribution,
    Note,
    float_of,
    moves_of,
    word_of,
)
from zmqtrain.store.checkpoint import ShardCopy
from zmqtrain.store.holdings.base import Holding
from zmqtrain.store.holdings.dense import Dense
from zmqtrain.store.holdings.tables import Tables
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.manifest import Manifest
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import (
    ACCUMULATED,
    CLOCK,
    IN_FORCE,
    ORDERS,
    RATE,
    RESTED,
    VERSION,
    SegmentLayout,
)
from zmqtrain.store.table_memory import Kept, KeptRows


class Shard:
    """One ps's part of the model, in private memory unless a segment is given.

    A worker's gradient is read from its buffer in the segment: it is *staged* there when its push
    has arrived. ``safe``: every change survives a killed process, as far as the segment does.
    ``threads``: number of threads that share a large change; None: one for each core. ``device``:
    computes the updates, if not in the segment; they cannot be safe then. ``batch_size``: examples
    of most gradients; others weigh more or less in a mean. ``tables``: changed with the rest.
    Calls that carry out an order take its number (0: none).
    """

    def __init__(
        self,
        layout: ShardLayout,
        update: Update,
        segment: Segment | None = None,
        *,
        safe: bool = False,
        threads: int | None = 1,
        device: Device | None = None,
        batch_size: int = 1,
        tables: Tables | None = None,
    ) -> None:
        self.layout = layout
        self.batch_size = batch_size
        self.update = update
        self.safe = safe
        self.segment = segment or Segment.private(segment_layout(layout, update))
        self.dense = Dense(
            layout, self._rule_in_use(), self.segment, safe=safe, threads=threads, device=device
        )
        self.tables = tables
        self._holdings: tuple[Holding, ...] = (self.dense, *([tables] if tables else []))
        if self.learning_rate is not None:
            self._use_rate_for_tables()
        self._note = Note(self.segment)
        self._staged: dict[int, Contribution] = {}  # by worker
        self.is_changing = False  # a change has begun; if it failed, for good
        self.moves = Moves()

    @property
    def version(self) -> int:
        """Updates applied."""
        return self.segment.words[VERSION]

    @property
    def accumulated(self) -> float:
        """The weight of the gradients in the sum."""
        return float_of(self.segment.words[ACCUMULATED])

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of later updates in place of the optimizer's; None: there is none."""
        bits = self.segment.words[RATE]
        return -float_of(bits) if bits else None

    @learning_rate.setter
    def learning_rate(self, rate: float | None) -> None:
        was_own = self.learning_rate is None
        # Negative: the bits of 0.0 are 0, which stands for none, but those of -0.0 are not.
        self.segment.words[RATE] = 0 if rate is None else word_of(-rate)
        if was_own:
            self.take_over_rate()

    @property
    def parameters(self) -> Flat:
        return self.segment.parameters

    def copy(self, part: slice, *, average: bool) -> Flat:
        """Return a copy of some parameters, or of their moving averages."""
        return (self.segment.slots[AVERAGE] if average else self.parameters)[part].copy()

    def keep(self, *, average: bool) -> Kept:
        """Return what it owns as it is now; the shard is idle."""
        rows = None if self.tables is None else KeptRows(self.tables.memory)
        return Kept(self.version, self.copy(self.layout.owned, average=average), rows)

    def table_status(self) -> dict[str, TableStatus]:
        """Return the status of each table on this shard."""
        return {} if self.tables is None else self.tables.status()

    @property
    def slots(self) -> dict[str, Flat]:
        """The current slots of the update rule; the shard is idle."""
        return self.dense.slots

    def initialize(
        self,
        parameters: Flat,
        slots: Mapping[str, Flat] | None = None,
        version: int = 0,
        missed: Mapping[str, int] | None = None,
    ) -> None:
        """Begin with these parameters (float32, shape (layout.size,)), copied."""
        with self._beginning(version):
            self.dense.initialize(parameters, slots, missed)
            if self.tables is not None:
                self.tables.initialize()

    def restore(self, path: Path, manifest: Manifest) -> None:
        """Begin with a checkpoint, whatever the placement that wrote it.

        ``manifest`` comes from ``read_manifest(path)``, and ``verify`` has passed.

        Raises:
            CheckpointError: it lacks a part of this shard, or a file is damaged.
        """
        take_over = [holding.read(path, manifest) for holding in self._holdings]
        with self._beginning(manifest.version):
            for call in take_over:
                call()

    def write(self, directory: Path, layout: ShardLayout | None = None) -> ShardCopy:
        """Copy its own slices into a file in an attempt's temporary directory; the shard is idle.

        ``layout``: the one to write, in place of its own. Tables are frozen, and written only by
        :func:`zmqtrain.store.checkpoint.seal_shard`, beside later changes.

        Raises:
            CheckpointError: the file cannot be written, or a change has failed half-way.
        """
        if self.is_changing:
            raise CheckpointError(f"update {self.version} of this shard failed half-way")
        layout = layout or self.layout
        arrays, tables = self.dense.tensors(layout), self.tables
        frozen = [] if tables is None else tables.freeze(layout)
        file = checkpoint.shard_file(directory, layout.shard)
        return checkpoint.copy_tensors(file, arrays, self.dense.missed, frozen)

    def keep_frozen(self) -> None:
        """Copy what a checkpoint lacks of tables, before other processes change them."""
        if self.tables is not None:
            self.tables.keep_frozen()

    def load(self) -> None:
        """Take over values that were written into parameters and slots; the shard is idle."""
        for holding in self._holdings:
            holding.load()

    def repair(self) -> Change | None:
        """Finish the change that a killed process left; return the last change, if any."""
        change, is_alone = self._note.last(), not self.segment.board[IN_FORCE]
        if self.tables is not None and is_alone:  # else members of a board may be changing them
            self.tables.repair_stores()
        if change is not None and self._note.is_under_way:
            for holding in self._holdings:
                holding.repair(change)
            self._make(change)
        words = self.segment.words
        if is_alone:
            words[CLOCK] += words[CLOCK] % 2
        return change

    def stage(self, worker: int, number: int, sequence: int = 0, weight: float = 1) -> None:
        """Make gradient ``number`` of the segment the worker's contribution."""
        self._staged[worker] = Contribution(number, worker, sequence, weight)

    def staged(self, worker: int) -> Contribution | None:
        """Return the worker's contribution, None if it has none."""
        return self._staged.get(worker)

    def is_staged(self, number: int) -> bool:
        """Return whether gradient ``number`` may still be needed."""
        return any(number == staged.buffer for staged in self._staged.values())

    def carry_out(
        self, order: Order, number: int = 0
    ) -> Literal["applied", "accumulated", "unchanged"]:
        """Carry out an order on the shard; return the results of its gradients."""
        match order:
            case Apply() | Reduce() | Accumulate():
                change = self._change_of(order, number)
                if change.local_steps and len(change.contributions) > 1:
                    of_differences = self.update.outer.of_differences
                    self.moves = moves_of(
                        change, self.segment, self.layout, of_differences=of_differences
                    )
                elif change.among:
                    self.moves = Moves()  # others are not at the same point
                self._clip(change, None if isinstance(order, Accumulate) else order.square)
                self._make(self._begun(change))
                return "accumulated" if isinstance(order, Accumulate) else "applied"
            case Rate(learning_rate):
                self.learning_rate = learning_rate
        return "unchanged"

    def settle(self, target: Flat) -> None:
        """Move the trained parameters to ``target``, after an update; the shard is idle.

        ``target``: float32, of shape (layout.trained,). The slot RESIDUAL, if there is one, takes
        up the difference. If the process is killed, elements not yet moved stay where they are.
        """
        words = self.segment.words
        self.dense.begin_parts()
        self.is_changing = True
        words[CLOCK] += 1
        if self.safe:
            self._note.settle()
        self.dense.settle(target)
        self._note.finish()
        self.is_changing = False
        words[CLOCK] += 1

    def square_of(self, update: Apply | Reduce) -> int:
        """Return the share of this shard in ``square`` of this order: see optim/norm.py."""
        return sum(holding.square(self._change_of(update, 0)) for holding in self._holdings)

    def rest(self, version: int) -> None:
        """Go on at a later version; the optimizer's slots had no part in the steps up to it."""
        words = self.segment.words
        self.dense.carry_missed(words[VERSION], version)
        words[RESTED] += version - words[VERSION]
        words[VERSION] = version

    def _clip(self, change: Change, square: float | None) -> None:
        """Set the factor of an update; ``square``: None if this shard holds all variables."""
        limit = self.update.clip_norm
        if limit is not None and change.kind == UPDATE and not change.local_steps:
            if square is None:
                square = float(sum(holding.square(change) for holding in self._holdings))
            change.clip = clip_scale(square, limit)

    def _change_of(self, order: Apply | Reduce | Accumulate, number: int) -> Change:
        staged = tuple([self._staged[worker] for worker in order.workers])
        before = 0.0 if isinstance(order, Apply) else self.accumulated
        kind = ACCUMULATE if isinstance(order, Accumulate) else UPDATE
        weights = [one.weight for one in staged]
        return Change(
            kind=kind,
            contributions=staged,
            weight=before + sum(weights),
            unit=self.batch_size if before or kind == ACCUMULATE else max(weights),
            step=self.version,
            with_sum=before > 0,
            order=number,
            local_steps=0 if isinstance(order, Accumulate) else order.local_steps,
            rested=self.segment.words[RESTED],
            among=order.among if isinstance(order, Apply) else 0,
            cycle=order.cycle if isinstance(order, Apply) else 0,
        )

    def take_over_rate(self) -> None:
        """Use the learning rate that another process has set in the segment, if one has."""
        if self.learning_rate is not None:
            self.dense.use(self._rule_in_use())
            self._use_rate_for_tables()

    def can_update(self, step: int) -> bool:
        """Return whether update ``step`` can be made by parts: rules need a learning rate."""
        try:
            self.dense.check(step)
            if self.tables is not None:
                self.tables.check(step)
        except ConfigError:
            return False
        return True

    def step_of(self, buffers: Sequence[int], weights: Sequence[float], step: int) -> Change:
        """Return update ``step`` by the gradients in these buffers, which were not pushed."""
        pairs = zip(buffers, weights, strict=True)
        given = tuple(Contribution(buffer, -1, 0, weight) for buffer, weight in pairs)
        change = Change(UPDATE, given, sum(weights), max(weights), step)
        self._clip(change, None)
        return change

    @contextmanager
    def _beginning(self, version: int) -> Iterator[None]:
        """Forget staged gradients, the note and the sum while other values are taken over."""
        words = self.segment.words
        words[CLOCK] += 1
        yield
        words[VERSION], words[ACCUMULATED], words[RATE], words[RESTED] = version, 0, 0, 0
        words[CLOCK] += 1
        self.is_changing = False
        self._note.forget()
        self._staged.clear()

    def _begun(self, change: Change) -> Change:
        """Prepare and note a change, unless the rule refuses; then return it."""
        if self.is_changing:
            raise SegmentError(
                f"update {self.version} of this shard failed half-way; only a new life of its ps "
                "can finish it"
            )
        for holding in self._holdings:
            holding.begin(change)
        self.is_changing = True
        self.segment.words[CLOCK] += 1
        if self.safe:
            self._note.write(change)
        return change

    def _make(self, change: Change) -> None:
        """Make or finish a change that has begun."""
        words = self.segment.words
        if change.kind == UPDATE:
            for holding in self._holdings:
                holding.update(change)
            words[VERSION] = change.step + (change.local_steps or 1)
            words[RESTED] = change.rested + change.local_steps
            if change.with_sum:  # else the step that the sum is of goes on
                words[ACCUMULATED] = 0
        elif change.kind == ACCUMULATE:
            for holding in self._holdings:
                holding.add(change)
            words[ACCUMULATED] = word_of(change.weight)
        if change.order:
            words[ORDERS] = change.order
        self._note.finish()
        self.is_changing = False
        words[CLOCK] += words[CLOCK] % 2

    def _use_rate_for_tables(self) -> None:
        if self.tables is not None:
            self.tables.use(self.update.rule, self._rule_in_use().rule)

    def _rule_in_use(self) -> Update:
        """Return the update rule; only with a replaced learning rate, it looks that one up."""
        update, rule = self.update, cast(Any, self.update.rule)
        if self.learning_rate is None or not has_rate(rule):
            return update
        rate = Replaceable(rule.learning_rate, lambda: self.learning_rate)
        return replace(update, rule=replace(rule, learning_rate=rate))


def segment_layout(layout: ShardLayout, update: Update) -> SegmentLayout:
    """Return the layout of such a shard's segment."""
    slots = [slot.name for slot in update.slots]
    state = layout.averaged - layout.trained, layout.size - layout.averaged
    return SegmentLayout(layout.size, slots, len(layout.numbers), state)
