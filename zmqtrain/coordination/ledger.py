"""The leases of batches: each batch of the endless stream is counted exactly once.

A batch number is leased to a worker, comes back with the push that was computed from it, and is
counted when that push is applied. A batch that is not counted (its push was dropped, or its worker
left) is leased again, lowest number first. The ledger is part of the leader, because consumption
is recorded together with the update.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zmqtrain.coordination.events import PushArrived, Stepped
from zmqtrain.metrics.sums import added
from zmqtrain.models.weights import weight_of
from zmqtrain.protocol.checkpoint import LedgerState
from zmqtrain.protocol.orders import Roster
from zmqtrain.store.segment_layout import MAX_STEPS

_OF_PASS = "limit", "pass_examples", "pass_loss", "pass_sums", "pass_weight"


@dataclass(slots=True)
class Ledger:
    """Leases batch numbers 0, 1, 2, ..., and counts them.

    It continues a checkpoint's, with ``returned``: the batches that were leased but not counted.
    """

    next_batch: int = 0
    returned: list[int] = field(default_factory=list)  # to be leased again; a heap
    examples: int = 0  # counted
    pushes: dict[int, PushArrived] = field(default_factory=dict)  # pending, by their first batch
    leases: dict[int, list[int]] = field(default_factory=dict)  # worker -> batches, as leased
    pending: dict[int, list[int]] = field(default_factory=dict)  # worker -> batches not yet counted

    outstanding: int = 0  # batches leased or pending: each may still become a counted one
    limit: int | None = None  # batches from this number on are not leased
    pass_examples: int = 0  # counted since the limit was last raised
    pass_loss: float = 0.0  # sum of the mean losses of these batches times their weights
    pass_sums: dict[str, float] = field(default_factory=dict)  # of measures that all of them have
    pass_weight: float = 0.0  # sum of these weights

    def __post_init__(self) -> None:
        heapq.heapify(self.returned)

    @classmethod
    def restored(cls, state: LedgerState) -> Ledger:
        """Return the ledger that continues a checkpoint's."""
        of_pass = {name: getattr(state, name) for name in _OF_PASS}
        # An older checkpoint has no weights: they were the numbers of examples.
        of_pass["pass_weight"] = state.pass_weight or float(state.pass_examples)
        return cls(state.next_batch, list(state.open_batches), state.examples, **of_pass)

    @property
    def may_lease(self) -> bool:
        """Whether there is a batch below the limit."""
        following = self.returned[0] if self.returned else self.next_batch
        return self.limit is None or following < self.limit

    @property
    def is_at_limit(self) -> bool:
        """Whether every batch below the limit is counted, or cannot be."""
        return not self.outstanding and not self.may_lease

    def raise_limit(self, limit: int) -> None:
        """Lease batches up to this number; a higher limit begins a new pass."""
        if self.limit is not None and limit > self.limit:
            self.limit, self.pass_examples, self.pass_sums = limit, 0, {}
            self.pass_loss = self.pass_weight = 0.0

    def lease(self, worker: int) -> int:
        if self.returned:
            batch = heapq.heappop(self.returned)
        else:
            batch = self.next_batch
            self.next_batch += 1
        self.leases.setdefault(worker, []).append(batch)
        self.outstanding += 1
        return batch

    def holds(self, worker: int, batch: int, batches: int = 1) -> bool:
        """Return whether a worker has leased ``batches`` batches, of which this is the first."""
        leases = self.leases.get(worker, [])
        return batch in leases and len(leases) - leases.index(batch) >= batches

    def arrive(self, push: PushArrived) -> None:
        """Note the arrival of the gradient of a leased batch, or of the result of several."""
        self.pushes[push.batch] = push
        leases = self.leases[push.worker]
        first = leases.index(push.batch)
        self.pending.setdefault(push.worker, []).extend(leases[first : first + push.batches])
        del leases[first : first + push.batches]

    def count(self, worker: int) -> None:
        """Count the worker's pending batches, which were applied."""
        for batch in self.pending.pop(worker, ()):
            if (push := self.pushes.pop(batch, None)) is not None:
                self._add(push, weight_of(push) * push.loss)
            self.outstanding -= 1

    def count_all(self) -> None:
        """Count all pending batches, which were applied."""
        for worker in sorted(self.pending):  # so that sums have the same bits in each run
            self.count(worker)

    def roster(self, workers: Sequence[int], most: int, lookahead: int) -> Roster | None:
        """Return at most ``most`` steps that workers can make by themselves; None: not one.

        In each step every worker counts its oldest batch and gets the next number, in this order,
        so the steps need no messages: see :meth:`advance`. The end of a pass is left out.
        """
        held = [len(self.leases.get(worker, ())) for worker in workers]
        if self.returned or self.pending or any(each != 1 + lookahead for each in held):
            return None
        if self.limit is not None:
            most = min(most, (self.limit - self.next_batch) // len(workers))
        steps = min(most, MAX_STEPS)
        return Roster(tuple(workers), steps, self.next_batch) if steps > 0 else None

    def advance(self, workers: Sequence[int], more: Stepped) -> None:
        """Count the steps of a roster that were made."""
        steps, count, first = more.steps, len(workers), self.next_batch
        self.next_batch += steps * count
        for place, worker in enumerate(workers):
            held, given = self.leases[worker], range(first + place, self.next_batch, count)
            self.leases[worker] = [*held[steps:], *given[max(0, steps - len(held)) :]]
        if steps:
            self._add(more, more.loss)

    def _add(self, of: PushArrived | Stepped, loss: float) -> None:
        self.pass_sums = added(self.pass_sums, of.sums) if self.pass_examples else dict(of.sums)
        self.examples += of.examples
        self.pass_examples += of.examples
        self.pass_weight += weight_of(of)
        self.pass_loss += loss

    def give_back(self, worker: int) -> None:
        """Return the batches of the worker's last pending push, which was dropped."""
        for batch in self._last_pending(worker):
            heapq.heappush(self.returned, batch)

    def skip(self, worker: int) -> None:
        """Skip the batches of the worker's last pending push, which is not finite."""
        self._last_pending(worker)

    def leave(self, worker: int) -> None:
        """Take back the worker's leases; pending batches stay pending."""
        for batch in self.leases.pop(worker, ()):
            heapq.heappush(self.returned, batch)
            self.outstanding -= 1

    @property
    def uncounted(self) -> int:
        return min(self.open_batches(), default=self.next_batch)

    @property
    def mean_loss(self) -> float:
        """Mean loss of the batches counted in this pass, weighted; NaN before the first."""
        return self.pass_loss / self.pass_weight if self.pass_examples else math.nan

    def open_batches(self) -> tuple[int, ...]:
        """Return the numbers below ``next_batch`` that are not counted, in order."""
        held = [*self.leases.values(), *self.pending.values()]
        return tuple(sorted([*self.returned, *(batch for batches in held for batch in batches)]))

    def state(self) -> LedgerState:
        of_pass = {name: getattr(self, name) for name in _OF_PASS}
        return LedgerState(self.next_batch, self.open_batches(), self.examples, **of_pass)

    def _last_pending(self, worker: int) -> list[int]:
        """Remove and return the batches of the worker's last pending push."""
        pending = self.pending[worker]
        first = next(n for n in reversed(range(len(pending))) if pending[n] in self.pushes)
        del self.pushes[pending[first]]
        batches = pending[first:]
        del pending[first:]
        if not pending:
            del self.pending[worker]
        self.outstanding -= len(batches)
        return batches
