"""Local steps without rounds: the batches that each worker gets, and its share of momentum. Pure.

A worker gets batches in proportion to its speed, the fastest one the policy's number, so
that their results come equally often (dynamic local updates: Liu et al., arXiv:2401.09135). Nothing
here knows a clock: a worker's speed is its share of all batches that are counted while it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zmqtrain.optim.outer import CLOSES, OPENS

KEEP = 0.75
"""Weight of an earlier result in a worker's speed, in ratio to the one after it."""

_ALMOST_ONE = 1 - 1e-6  # sums of shares are rounded


@dataclass
class Arrivals:
    """Counts of the workers' results, as plain data: see :mod:`.state`."""

    under_way: dict[int, int] = field(default_factory=dict)  # worker -> batches of its next result
    paces: dict[int, list[float]] = field(default_factory=dict)  # worker -> its batches, and all
    cycle: float = 0.0  # sum of the shares in this cycle of momentum

    def leave(self, worker: int) -> None:
        """Forget a worker."""
        self.under_way.pop(worker, None)
        self.paces.pop(worker, None)

    def batches(self, worker: int, most: int) -> int:
        """Return how many batches a worker is to get; ``most``: those of the fastest."""
        speeds = {each: own / of_all for each, (own, of_all) in self.paces.items() if own}
        fastest = max(speeds.values(), default=1.0)
        return max(1, round(most * speeds.get(worker, fastest) / fastest))

    def counted(self, worker: int, batches: int, among: int) -> int:
        """Note a result of one ``among`` workers; return its ``cycle``, see optim/outer.py."""
        for each in {worker, *self.under_way}:
            own, of_all = self.paces.get(each, (0.0, 0.0))
            self.paces[each] = [own, of_all + batches]
        own, of_all = self.paces[worker]
        self.paces[worker] = [KEEP * (own + batches), KEEP * of_all]
        self.under_way.pop(worker, None)
        opens = 0 if self.cycle else OPENS
        self.cycle += 1 / among
        if self.cycle < _ALMOST_ONE:
            return opens
        self.cycle = 0.0
        return opens | CLOSES
