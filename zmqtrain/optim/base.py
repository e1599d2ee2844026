"""The contract of an update rule: pure arithmetic over flat float32 memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from zmqtrain.compute.arrays import Flat


@dataclass(frozen=True, slots=True)
class Slot:
    """State that a rule keeps for each parameter element, such as a momentum.

    ``initial`` is the value that every element starts with; None means the parameter's own
    initial value (moving averages start there).
    """

    name: str
    initial: float | None


@runtime_checkable
class Rule(Protocol):
    """An optimizer: how one gradient changes the parameters and the slots.

    A rule holds no state of its own, so one object serves any number of shards and threads. Its
    ``repr`` enters the job's fingerprint: equal rules must have equal texts in every process.
    """

    @property
    def slots(self) -> tuple[Slot, ...]: ...

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        """Apply one update in place. All arrays have the same shape (n,).

        Each element depends on its own values only: updating the memory block by block gives, bit
        for bit, what one call for all of it gives. ``slots`` holds at least the rule's own.
        ``gradient`` is only read, so an update that was cut short can be redone from it. ``step``
        counts the updates applied before this one (0 for the first); schedules are evaluated at
        it. A rule that refuses (ConfigError) does so by the step alone, before it changes
        anything: for the other blocks it refuses as well then.
        """
        ...
