"""Runs of update rules for their tests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from zmqtrain.optim import Flat, Rule, new_slots


class Run:
    """Parameters and slots in one arena each, from element ``offset`` on, margins around them.

    The number of a step and ``seed`` decide about its gradient.
    """

    def __init__(self, rule: Rule, size: int, offset: int = 0, seed: int = 0) -> None:
        self.rule, self.size, self.seed = rule, size, seed
        self.arenas = {"parameters": self._normal(size + 20, 10**6)}
        self.arenas |= new_slots(rule, self.arenas["parameters"])
        self.inside = slice(offset, offset + size)

    def step(self, step: int, gradient: Flat | None = None, cuts: Iterable[int] = ()) -> Run:
        """Update all of the memory, in one call or in one for each run between ``cuts``."""
        if gradient is None:
            gradient = self.gradient(step)
        for start, stop in pairwise([0, *sorted(cuts), len(gradient)]):
            slots = {name: slot[start:stop] for name, slot in self.slots.items()}
            self.rule.update(self.parameters[start:stop], gradient[start:stop], slots, step)
        return self

    def steps(self, count: int) -> Run:
        for step in range(count):
            self.step(step)
        return self

    def gradient(self, step: int) -> Flat:
        return self._normal(self.size + 1, step)[1:]

    @property
    def parameters(self) -> Flat:
        return self.arenas["parameters"][self.inside]

    @property
    def slots(self) -> dict[str, Flat]:
        return {slot.name: self.arenas[slot.name][self.inside] for slot in self.rule.slots}

    @property
    def memory(self) -> dict[str, bytes]:
        return {name: arena.tobytes() for name, arena in self.arenas.items()}

    def _normal(self, size: int, number: int) -> Flat:
        return np.random.default_rng([self.seed, number]).standard_normal(size, np.float32)
