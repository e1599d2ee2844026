"""The contract of an update rule: pure arithmetic over flat float32 memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from zmqtrain.compute.arrays import Flat


@dataclass(frozen=True, slots=True)
class Slot:
    """State that a rule keeps for each parameter element, such as a momentum.

    ``initial`` is the initial value of every element; None means the parameter's own initial value
    (for moving averages). ``by_row``: it has one element for each row of a table instead.
    """

    name: str
    initial: float | None
    by_row: bool = False


@runtime_checkable
class Rule(Protocol):
    """An optimizer: how one gradient changes the parameters and the slots.

    A rule has no state, so one object serves any number of shards and threads. Its ``repr`` is part
    of the job's fingerprint: equal rules must have the same ``repr`` in every process.
    """

    @property
    def slots(self) -> tuple[Slot, ...]: ...

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        """Apply one update in place. All arrays have the same shape (n,).

        Each element depends only on its own values: an update block by block gives the same bits
        as one call. ``slots`` contains at least the rule's own. ``gradient`` is only read, so an
        interrupted update can be repeated. ``step`` counts the updates before this one (0 for the
        first); schedules are evaluated at it. A rule may raise ConfigError only depending on
        ``step``, and before it changes anything, so that it raises for all blocks.
        """


def new_slots(rule: Rule, parameters: Flat) -> dict[str, Flat]:
    """Allocate a rule's slots for these parameters (shape (n,)), with their initial values."""
    return {
        slot.name: parameters.copy()
        if slot.initial is None
        else np.full_like(parameters, slot.initial)
        for slot in rule.slots
    }
