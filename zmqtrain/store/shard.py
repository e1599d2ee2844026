"""A shard: the arithmetic on one ps's segment.

All arithmetic on parameters happens here. Nothing here decides; the orders come from the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from struct import Struct
from typing import Any, Literal, cast

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.compute.device import Device
from zmqtrain.errors import ConfigError
from zmqtrain.optim import AVERAGE, Update
from zmqtrain.optim.pipeline import Piece, Pieces
from zmqtrain.optim.schedules import Replaceable, has_rate
from zmqtrain.protocol.orders import Accumulate, Apply, Order, Rate, Reduce
from zmqtrain.store.arithmetic import Memory
from zmqtrain.store.changes import ACCUMULATE, UPDATE, Change, Changes, Contribution
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import ACCUMULATED, CLOCK, RATE, VERSION, SegmentLayout

_DOUBLE, _WORD = Struct("<d"), Struct("<q")


class Shard:
    """One ps's part of the model, in private memory unless a segment is given.

    A worker's gradient is read from its buffer in the segment: it is *staged* there when its push
    has arrived. ``safe``: every change survives a killed process, as far as the segment does.
    ``threads``: so many share a large change; None: one for each core. ``device``: where updates
    are computed, if not in the segment; they cannot be safe then. ``batch_size``: examples of most
    gradients; those of others weigh more or less in a mean. Calls that carry out an order take its
    number (0: none).
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
    ) -> None:
        self.layout = layout
        self._batch_size = batch_size
        self.rule = update
        self.safe = safe
        self.segment = segment or Segment.private(segment_layout(layout, update))
        self._memory = Memory(self.segment, device)
        self._threads = threads
        self._changes = self._bind()
        self._staged: dict[int, Contribution] = {}  # by worker

    @property
    def version(self) -> int:
        """Updates applied."""
        return self.segment.words[VERSION]

    @property
    def accumulated(self) -> int:
        """Examples whose gradients are in the sum."""
        return self.segment.words[ACCUMULATED]

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of later updates in place of the optimizer's; None: there is none."""
        bits = self.segment.words[RATE]
        return -float(_DOUBLE.unpack(_WORD.pack(bits))[0]) if bits else None

    @learning_rate.setter
    def learning_rate(self, rate: float | None) -> None:
        was_own = self.learning_rate is None
        self.segment.words[RATE] = 0 if rate is None else _WORD.unpack(_DOUBLE.pack(-rate))[0]
        if was_own and rate is not None:
            self._changes = self._bind()

    @property
    def parameters(self) -> Flat:
        return self.segment.parameters

    def copy(self, part: slice, *, average: bool) -> Flat:
        """Return a copy of some parameters, or of their moving averages."""
        return (self.segment.slots[AVERAGE] if average else self.parameters)[part].copy()

    @property
    def slots(self) -> dict[str, Flat]:
        """The current slots of the update rule; the shard is idle."""
        self._memory.publish_slots()
        return self.segment.slots

    def initialize(
        self, parameters: Flat, slots: Mapping[str, Flat] | None = None, version: int = 0
    ) -> None:
        """Begin with these parameters (float32, shape (layout.size,)), copied."""
        words = self.segment.words
        words[CLOCK] += 1
        np.copyto(self.parameters, parameters)
        for slot in self.rule.slots:
            initial = parameters if slot.initial is None else slot.initial
            np.copyto(
                self.segment.slots[slot.name], slots[slot.name] if slots is not None else initial
            )
        self._memory.load()
        words[VERSION], words[ACCUMULATED], words[RATE] = version, 0, 0
        words[CLOCK] += 1
        self._changes.forget()
        self._staged.clear()

    def load(self) -> None:
        """Take over what was written into the parameters and the slots; the shard is idle."""
        self._memory.load()

    def repair(self) -> Change | None:
        """Finish what a killed process left; return the last change of all, if there was one."""
        return self._changes.repair()

    def stage(self, worker: int, number: int, sequence: int = 0, examples: int = 1) -> None:
        """Make gradient ``number`` of the segment the worker's contribution."""
        self._staged[worker] = Contribution(number, worker, sequence, examples)

    def staged(self, worker: int) -> Contribution | None:
        """Return the worker's contribution, None if it has none."""
        return self._staged.get(worker)

    def is_staged(self, number: int) -> bool:
        """Say whether gradient ``number`` may still be needed."""
        return any(number == staged.buffer for staged in self._staged.values())

    def carry_out(
        self, order: Order, number: int = 0
    ) -> Literal["applied", "accumulated", "unchanged"]:
        """Change the shard as an order says; return what becomes of its gradients."""
        match order:
            case Apply() | Reduce() | Accumulate():
                self._changes.make(self._change_of(order, number))
                return "accumulated" if isinstance(order, Accumulate) else "applied"
            case Rate(learning_rate):
                self.learning_rate = learning_rate
        return "unchanged"

    def apply(self, worker: int, order: int = 0) -> None:
        """Apply the worker's gradient as one update."""
        self.carry_out(Apply(worker), order)

    def accumulate(self, worker: int, order: int = 0) -> None:
        """Add the worker's gradient to the step's sum."""
        self.carry_out(Accumulate(worker), order)

    def reduce(self, workers: tuple[int, ...], order: int = 0) -> None:
        """Apply the mean of the sum and of these workers' gradients, added in this order.

        It is the mean over their examples.
        """
        self.carry_out(Reduce(workers), order)

    def _change_of(self, order: Apply | Reduce | Accumulate, number: int) -> Change:
        staged = tuple([self._staged[worker] for worker in order.workers])
        before = 0 if isinstance(order, Apply) else self.accumulated
        kind = ACCUMULATE if isinstance(order, Accumulate) else UPDATE
        examples = before + sum([one.examples for one in staged])
        unit = self._batch_size if before or kind == ACCUMULATE else staged[0].examples
        return Change(kind, staged, examples, unit, self.version, before > 0, number)

    def _bind(self) -> Changes:
        """Return the arithmetic; only with a replaced learning rate the rule's is looked up."""
        update, rule = self.rule, cast(Any, self.rule.rule)
        if self.learning_rate is not None and has_rate(rule):
            rate = Replaceable(rule.learning_rate, lambda: self.learning_rate)
            update = replace(update, rule=replace(rule, learning_rate=rate))
        return Changes(
            self.segment,
            self._memory,
            update,
            *pieces_of(self.layout, update),
            safe=self.safe,
            threads=self._threads,
        )

    def take_over_rate(self) -> None:
        """Use the learning rate that another process has set in the segment, if one has."""
        if self.learning_rate is not None:
            self._changes = self._bind()

    def can_update(self, examples: int, step: int) -> bool:
        """Say whether update ``step`` can be made by parts, of gradients of so many examples.

        They have to weigh the same, and the rule needs a learning rate for it.
        """
        try:
            self._changes.check(step)
        except ConfigError:
            return False
        return examples == self._batch_size

    def begin_parts(self, numbers: Iterable[int]) -> None:
        """Nothing of the next update of these parts is done."""
        self._changes.begin_parts(numbers)

    def update_parts(self, numbers: Iterable[int], buffers: Sequence[int], step: int) -> None:
        """Make, or finish, update ``step`` of these parts: by the mean of these gradients."""
        self._changes.update_parts(numbers, buffers, step)


def segment_layout(layout: ShardLayout, update: Update) -> SegmentLayout:
    """Return the layout of such a shard's segment."""
    slots = [slot.name for slot in update.slots]
    factors = len(pieces_of(layout, update)[1]) if update.is_layered else 0
    state = layout.averaged - layout.trained, layout.size - layout.averaged
    return SegmentLayout(layout.size, slots, factors, state)


def pieces_of(layout: ShardLayout, update: Update) -> tuple[Pieces, list[int]]:
    """Return the pieces of the shard's trained variables, and how many elements each has.

    The zeros between two slices go with the first; they are not counted.
    """
    numbers: dict[str, int] = {}
    sizes: list[int] = []
    pieces: list[Piece] = []
    for cut, start, stop in layout.runs:
        if cut.variable.kind == "trained":
            number = numbers.setdefault(cut.variable.name, len(sizes))
            if number == len(sizes):
                sizes.append(0)
            sizes[number] += cut.size
            group = update.group_of(cut.variable.name)
            pieces.append(Piece(slice(start, stop), number, group))
    return pieces, sizes
