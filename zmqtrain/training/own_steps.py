"""The steps of one worker on parameters of its own: by a rule, or by an optimizer of a framework.

All variables are in one private block of memory, where a batch is applied as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.adapters.optimizers import inner_of
from zmqtrain.compute.arrays import zeros
from zmqtrain.job import Job
from zmqtrain.optim import Rule
from zmqtrain.optim.inner import Inner
from zmqtrain.optim.norm import clip_scale, square_of
from zmqtrain.optim.outer import Outer
from zmqtrain.protocol.orders import Apply
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.shard import Shard
from zmqtrain.training.memory import WorkerMemory
from zmqtrain.user_code import user_code

_WORKER, _GRADIENT = 0, 0  # a rule's shard has one of each


class OwnSteps:
    """Steps by the inner optimizer, which is made anew for each beginning.

    ``parameters``, ``gradient``: float32 of shape (layout.size,).
    """

    inner: Inner

    def __init__(self, job: Job, layout: ShardLayout, threads: int | None) -> None:
        """``threads``: number that update a large model by a rule; None: one for each core."""
        self._job, self._trained = job, layout.trained
        self._optimizer = job.optimizer if job.inner is None else job.inner
        self._is_rule = isinstance(self._optimizer, Rule)
        self._make: Callable[[], Inner]
        if self._is_rule:
            shard = _shard_of(job, layout, threads)
            self.parameters, self.gradient = shard.parameters, shard.segment.gradient(_GRADIENT)
            self._make = partial(RuleInner, shard)
            return
        self.parameters, self.gradient = zeros(layout.size), zeros(layout.size)
        variables, blocks = job.variables(), (self.parameters, self.gradient)
        whole = [WorkerMemory(variables, [layout], [block]).values for block in blocks]
        names = [variable.name for variable in variables if variable.kind == "trained"]
        given = [{name: values[name] for name in names} for values in whole]
        self._make = partial(inner_of, job.inner, job.model, *given)

    def begin(self) -> None:
        """Forget all state; the parameters have their values."""
        self.inner = self._make()

    def go_on(self, step: int, learning_rate: float | None) -> None:
        """Go on at a step of the job, whose rate a callback may have set."""
        with user_code("the schedule", self._optimizer):
            self.inner.go_on(step, learning_rate)

    def apply(self, absent: Collection[str]) -> None:
        """Make a step by the gradient, which variables in ``absent`` do not have.

        Raises:
            ConfigError: the optimizer cannot make this step.
        """
        if not self._is_rule:
            self._clip()
        with user_code("a step", self._optimizer):
            self.inner.update(absent)
        np.copyto(self.parameters[self._trained :], self.gradient[self._trained :])

    def _clip(self) -> None:
        job, gradient = self._job, self.gradient[: self._trained]
        if (limit := job.clip_norm) is not None:
            scale = clip_scale(float(square_of(gradient, limit)), limit)
            gradient *= np.float32(scale)
        if job.clip_value is not None:
            np.clip(gradient, -job.clip_value, job.clip_value, out=gradient)


class RuleInner:
    """A rule, in a shard of private memory: with the bits of a single process."""

    kind = "rule"

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        shard.initialize(shard.parameters.copy())

    def go_on(self, step: int, learning_rate: float | None) -> None:
        self._shard.rest(step)
        self._shard.learning_rate = learning_rate

    def update(self, absent: Collection[str]) -> None:
        shard = self._shard
        shard.segment.note_absent(_GRADIENT, shard.layout.numbers_of(absent))
        shard.stage(_WORKER, _GRADIENT)
        shard.carry_out(Apply(_WORKER))

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return the slots, and by how many steps each variable has missed updates."""
        missed = self._shard.dense.missed
        counts = np.array([missed.get(name, 0) for name in self._shard.layout.numbers])
        return self._shard.slots | {"/missed": counts, "/step": np.array(self._shard.version)}

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        shard = self._shard
        missed = dict(zip(shard.layout.numbers, state["/missed"].tolist(), strict=True))
        slots = {name: state[name] for name in shard.slots}
        shard.initialize(shard.parameters.copy(), slots, int(state["/step"]), missed)


def _shard_of(job: Job, layout: ShardLayout, threads: int | None) -> Shard:
    update = replace(job.update(), outer=Outer())
    if job.inner is not None:
        update = replace(update, rule=job.inner, l2=0.0, groups={})
    return Shard(layout, update, threads=threads)
