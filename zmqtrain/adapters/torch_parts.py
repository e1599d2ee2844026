"""The check of micro-batches: the loss must be a mean over the examples with the known weights."""

from __future__ import annotations

import copy
import logging
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from zmqtrain.compute.generators import generators_kept
from zmqtrain.errors import ConfigError
from zmqtrain.models.checks import CheckSchedule
from zmqtrain.models.trees import copied, leaves, mapped
from zmqtrain.models.weights import EMPTY, weighted_mean

log = logging.getLogger(__name__)

MOST_CHUNKS = 32  # of a batch, whose losses are compared
DRAWS = 32  # of a random loss, whose means are compared
DEVIATIONS = 8  # by which these may differ; by chance they do so once in a billion jobs
COARSE = 1e-2  # tolerance of losses that are computed in bfloat16
SHARE = 0.02  # of a batch, by which a weight may be wrong
ROUNDING = 2e-5  # of float32 sums, relative
IGNORED = -100  # the label that torch's losses leave out by default

Rows: TypeAlias = tuple[Any, ...]
"""Arrays, or outputs of a module, that share their first axis."""


class PartsCheck:
    """Compares the loss of rows with the losses of parts of them, in some of the steps."""

    def __init__(
        self, owner: object, weight_of: Callable[[Any], float | None], tolerance: float
    ) -> None:
        """``owner``: the model, for texts. ``weight_of(batch)`` returns a weight; None: the number
        of rows. ``tolerance``: relative, of losses that should be equal."""
        self._owner, self._weight_of, self._tolerance = owner, weight_of, tolerance
        self._schedule = CheckSchedule()
        self._is_random = self._knows_ignored = False
        self._chunks: list[tuple[Rows, int]] = []  # of the step under way
        self._is_due = False

    def begin(self) -> None:
        """Begin a step."""
        self._chunks = []
        self._is_due = self._schedule.is_due() and not self._is_random

    def is_due(self, targets: Any) -> bool:
        """Return whether to compare the losses of a part of the batch with these targets."""
        if not (self._knows_ignored or self._is_random) and has_ignored(targets):
            self._knows_ignored = self._is_due = True
        return self._is_due

    def check(self, of: Callable[[Rows], Any], rows: Rows, count: int, parts: int) -> None:
        """Compare the losses within a part of the batch, and with the end of the part before.

        ``of`` returns the loss of rows, of which the last is the part. ``count``: rows of this
        part. ``parts``: parts of a batch.

        Raises:
            ConfigError: the loss is not a mean over examples.
        """
        if self._is_random:
            return
        size = max(min(count, 2), -(-count * parts // MOST_CHUNKS))
        bounds = [*range(0, count - size + 1, size), count]
        new = [(_rows(rows, start, end, count), end - start) for start, end in pairwise(bounds)]
        chunks = [*self._chunks, *new]
        self._chunks = new[-1:]
        for (a, len_a), (b, len_b) in pairwise(chunks):
            both = _joined(a, b, len_a, len_b)
            if both is None:
                continue
            weights = [self._weight_of(a[-1]) or len_a, self._weight_of(b[-1]) or len_b]
            if set(weights) == {EMPTY}:  # their losses may be NaN
                continue
            whole, again = _value(of, both), _value(of, both)
            is_random = whole != again and not (math.isnan(whole) and math.isnan(again))
            wholes, means = [], []
            for _ in range(DRAWS if is_random else 1):
                wholes.append(_value(of, both) if is_random else whole)
                each = [_value(of, a), _value(of, b)]
                means.append(weighted_mean(each, weights))
            whole, mean = statistics.fmean(wholes), statistics.fmean(means)
            scale = max(abs(whole), abs(mean), 1e-3)
            allowed = self._tolerance * scale
            if is_random:
                spread = statistics.variance(wholes) + statistics.variance(means)
                allowed += DEVIATIONS * math.sqrt(spread / DRAWS)
            elif self._tolerance < COARSE:  # errors of weights show in proportion
                allowed = min(allowed, max(SHARE * abs(each[0] - each[1]), ROUNDING * scale))
            if not abs(whole - mean) <= allowed:
                raise self._error(
                    f"the loss of {len_a + len_b} examples is {whole:.6g}, and the mean of those "
                    f"of {len_a} and {len_b} of them {mean:.6g}"
                )
            if is_random:
                self._is_random, self._is_due = True, False
                log.warning(
                    "the loss of %r is random, so the check that it is a mean over examples, which "
                    "micro_batches need, was only rough",
                    self._owner,
                )
                return

    def _error(self, found: str) -> ConfigError:
        return ConfigError(
            f"{self._owner!r} has micro_batches, and its loss is not a mean over examples: "
            f"{found}; parts of a batch would have wrong weights. Expected a loss that is the mean "
            "of the examples' losses: give weight=, a function of a batch that returns the number "
            "by which its loss divides, such as that of tokens, or leave micro_batches out"
        )


def own_loss(loss: Any) -> Any:
    """Return a loss that may be called for a comparison: one with state keeps it."""
    return copy.deepcopy(loss) if isinstance(loss, torch.nn.Module) else loss


@contextmanager
def comparing(module: Any) -> Iterator[None]:
    """Set torch's own modules to eval mode, in which they draw no random numbers; restore modes
    and generators afterwards."""
    modes = [(m, m.training) for m in module.modules() if type(m).__module__.startswith("torch.nn")]
    with generators_kept():
        try:
            for one, _ in modes:
                one.training = False
            yield
        finally:
            for one, mode in modes:
                one.training = mode


def _value(of: Callable[[Rows], Any], rows: Rows) -> float:
    return float(of(copied(rows)).detach())  # a module may write to its inputs


def _rows(rows: Rows, start: int, end: int, count: int) -> Rows:
    """Return some rows; leaves without a row for each example stay as they are."""

    def cut(leaf: Any) -> Any:
        return leaf[start:end].detach() if _has_rows(leaf, count) else leaf

    found: Rows = mapped(cut, rows)
    return found


def _joined(a: Rows, b: Rows, len_a: int, len_b: int) -> Rows | None:
    """Return the rows of both; None if they cannot be joined."""
    leaves_a, leaves_b = dict(leaves(a)), dict(leaves(b))
    if leaves_a.keys() != leaves_b.keys():
        return None
    joined = []
    for path, one in leaves_a.items():
        two = leaves_b[path]
        if not (_has_rows(one, len_a) and _has_rows(two, len_b)):
            joined.append(one)
        elif one.shape[1:] != two.shape[1:]:
            return None
        else:
            joined.append(torch.cat([one, two]))
    rest = iter(joined)
    found: Rows = mapped(lambda _: next(rest), a)
    return found


def has_ignored(batch: Any) -> bool:
    """Return whether integers of a batch are the label that torch's losses leave out."""
    found = (leaf for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
    return any(not one.is_floating_point() and bool((one == IGNORED).any()) for one in found)


def _has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == count
