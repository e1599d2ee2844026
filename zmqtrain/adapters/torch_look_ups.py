"""Rows of tables for the look-ups of a PyTorch module: one function of autograd for all of a step.

It reads ids where they lie in the batch, and gradients where backward() has them, so nothing is
copied to be contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from zmqtrain.models.tables import Ids, Rows
from zmqtrain.optim.kernels.look_ups import LookUps


class Sorted(NamedTuple):
    """A column of ids among those that were sorted together."""

    of: LookUps
    number: int

    @property
    def unique(self) -> Ids:
        return self.of.unique[self.number]

    @property
    def places(self) -> NDArray[np.int64]:
        return self.of.places(self.number)

    @property
    def size(self) -> int:
        return self.of.size(self.number)

    def is_of(self, ids: Any) -> bool:
        """Return whether these are the ids: int64 of shape (n,) on the CPU."""
        return self.of.is_of(self.number, (ids.data_ptr(), len(ids), ids.stride(0)))


def sorted_ids(ids: Any) -> Sorted:
    """Sort int64 ids of shape (n,) on the CPU."""
    return Sorted(LookUps([(ids.data_ptr(), len(ids), ids.stride(0))]), 0)


class Gathering(NamedTuple):
    """A look-up: its ids, their unique rows, and the receiver of the gradient of these."""

    ids: Sorted
    rows: Rows
    take: Callable[[Rows], None]


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    """The rows of several look-ups, whose ids were sorted together."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, look_ups: Sequence[Gathering]) -> Any:
        """``anchor``: any tensor that has a gradient; without one there is no backward."""
        ctx.look_ups = look_ups
        ctx.set_materialize_grads(False)
        return tuple(_rows_of(look_ups))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        pairs = zip(ctx.look_ups, gradients, strict=True)
        given = [(one, g) for one, g in pairs if g is not None]  # the loss depends on these rows
        given = [(one, g if g.stride(1) == 1 else g.contiguous()) for one, g in given]
        if given:
            where = [(one.ids.number, g.shape[1], g.data_ptr(), g.stride(0)) for one, g in given]
            sums = given[0][0].ids.of.add_up(where)
            for (one, _), total in zip(given, sums, strict=True):
                one.take(total)
        return None, None


def gathered(look_ups: Sequence[Gathering], *, is_trained: bool) -> Sequence[Any]:
    """Return the rows of each look-up, shape (n, dim), which have a gradient if ``is_trained``.

    The ids of all of them were sorted together.
    """
    if not look_ups or not is_trained:
        return _rows_of(look_ups)
    rows: Sequence[Any] = _Gathered.apply(torch.zeros((), requires_grad=True), look_ups)
    return rows


def _rows_of(look_ups: Sequence[Gathering]) -> list[Any]:
    rows = [np.ascontiguousarray(one.rows) for one in look_ups]
    pairs = zip(look_ups, rows, strict=True)
    found = [torch.empty((one.ids.size, own.shape[1])) for one, own in pairs]
    if look_ups:
        numbers = [one.ids.number for one in look_ups]
        look_ups[0].ids.of.expand(numbers, rows, [tensor.data_ptr() for tensor in found])
    return found
