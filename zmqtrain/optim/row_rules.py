"""Rules that look at a whole row of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zmqtrain.compute.arrays import BLOCK_SIZE, Flat
from zmqtrain.errors import ConfigError
from zmqtrain.optim.base import Slot
from zmqtrain.optim.checks import Checked, NonNegative, Positive
from zmqtrain.optim.schedules import Rate, rate_at


@dataclass(frozen=True, slots=True)
class RowwiseAdagrad(Checked):
    """Adagrad with one accumulator for a row of a table: a dim-th of Adagrad's memory.

    With a the slot "accumulator" of the row, ``initial_accumulator`` at first, and mean over the
    row's elements, added in their order:

        a += mean(g^2)
        w -= lr / (sqrt(a) + epsilon) * g

    It is FBGEMM's EXACT_ROWWISE_ADAGRAD, whose epsilon this is, and DLRM's RWSAdagrad, whose
    epsilon is 1e-10. It is a rule for tables only: ``Table(optimizer=RowwiseAdagrad(0.05))``.
    """

    learning_rate: Rate
    initial_accumulator: NonNegative = 0.0
    epsilon: Positive = 1e-8

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulator", self.initial_accumulator, by_row=True),)

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        """
        Raises:
            ConfigError: these are not rows.
        """
        raise ConfigError(
            f"{self!r} is a rule for rows of tables; expected a rule for all elements of a "
            "variable, such as Adagrad(0.05): give this one to tables alone, by "
            "Table(optimizer=...)"
        )

    def of_rows(self, dim: int) -> OfRows:
        """Return the rule for memory that has a row after the other, each of ``dim`` elements."""
        if dim > BLOCK_SIZE:
            raise ConfigError(
                f"{self!r}: a row has {dim} elements; expected at most {BLOCK_SIZE}; use Adagrad"
            )
        return OfRows(self, dim)


@dataclass(frozen=True, slots=True)
class OfRows:
    """A rule for at most BLOCK_SIZE elements of whole rows; a slot has an element for each row."""

    rule: RowwiseAdagrad
    dim: int

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.rule.slots

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        rate = np.float32(rate_at(self.rule.learning_rate, step))
        rows, dim = gradient.reshape(-1, self.dim), self.dim
        accumulator = slots["accumulator"][: len(rows)]
        squares = rows * rows
        total = np.zeros_like(accumulator)
        for column in range(dim):  # NumPy's sum of a row has an order of its own
            total += squares[:, column]
        accumulator += total / np.float32(dim)
        factor = rate / (np.sqrt(accumulator) + np.float32(self.rule.epsilon))
        parameters -= (rows * factor[:, None]).reshape(-1)
