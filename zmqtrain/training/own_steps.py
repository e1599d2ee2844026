"""The steps of one worker on parameters of its own: by a rule, or by an optimizer of a framework.

Both have all variables in one private block of memory, where a batch is applied as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from zmqtrain.adapters.optimizers import inner_of
from zmqtrain.compute.arrays import zeros
from zmqtrain.job import Job
from zmqtrain.models.weights import weight_of
from zmqtrain.optim import Rule
from zmqtrain.optim.inner import Inner
from zmqtrain.optim.norm import clip_scale, square_of
from zmqtrain.optim.outer import Outer
from zmqtrain.protocol.orders import Apply
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.shard import Shard
from zmqtrain.training.exchange import StepReport
from zmqtrain.training.memory import WorkerMemory
from zmqtrain.user_code import user_code

_WORKER, _GRADIENT = 0, 0  # the shard has one of each

State = Mapping[str, NDArray[Any]]


def own_steps(job: Job, layout: ShardLayout, threads: int | None) -> RuleSteps | InnerSteps:
    """``threads``: number that update a large model by a rule; None: one for each core."""
    if job.inner is None or isinstance(job.inner, Rule):
        return RuleSteps(job, layout, threads)
    return InnerSteps(job, layout)


class RuleSteps:
    """Steps by a rule, in a shard of private memory, with the bits of a single process.

    ``parameters``, ``gradient``: of shape (layout.size,). ``kind``: names the owner of the state,
    which another kind cannot take over.
    """

    kind = "rule"

    def __init__(self, job: Job, layout: ShardLayout, threads: int | None) -> None:
        update = replace(job.update(), outer=Outer())
        if job.inner is not None:
            update = replace(update, rule=job.inner, l2=0.0, groups={})
        size = job.worker_batch_size
        self._shard = Shard(layout, update, threads=threads, batch_size=size)
        self.parameters = self._shard.parameters
        self.gradient = self._shard.segment.gradient(_GRADIENT)

    def begin(self) -> None:
        """Forget all state; the parameters have their values."""
        self._shard.initialize(self.parameters.copy())

    def go_on(self, step: int, learning_rate: float | None) -> None:
        """Go on at a step of the job, whose rate a callback may have set."""
        self._shard.rest(step)
        self._shard.learning_rate = learning_rate

    def apply(self, report: StepReport) -> None:
        """Make a step by the gradient.

        Raises:
            ConfigError: the optimizer cannot make this step.
        """
        shard = self._shard
        shard.segment.note_absent(_GRADIENT, shard.layout.numbers_of(report.absent))
        shard.stage(_WORKER, _GRADIENT, weight=weight_of(report))
        shard.carry_out(Apply(_WORKER))

    def state(self) -> State:
        """Return the slots, and by how many steps each variable has missed updates."""
        missed = self._shard.dense.missed
        counts = np.array([missed.get(name, 0) for name in self._shard.layout.numbers])
        return self._shard.slots | {"/missed": counts, "/step": np.array(self._shard.version)}

    def load(self, state: State) -> None:
        """Take over a state of this kind after :meth:`begin`.

        Raises:
            ValueError, LookupError, RuntimeError: it does not fit.
        """
        names = self._shard.layout.numbers
        missed = dict(zip(names, state["/missed"].tolist(), strict=True))
        slots = {name: state[name] for name in self._shard.slots}
        step = int(state["/step"])
        self._shard.initialize(self.parameters.copy(), slots, step)
        self._shard.dense.initialize(self.parameters.copy(), slots, missed)


class InnerSteps:
    """Steps by an optimizer of a framework, with the methods of :class:`RuleSteps`."""

    def __init__(self, job: Job, layout: ShardLayout) -> None:
        self._job, self._trained = job, layout.trained
        self.parameters, self.gradient = zeros(layout.size), zeros(layout.size)
        variables, blocks = job.variables(), (self.parameters, self.gradient)
        whole = [WorkerMemory(variables, [layout], [block]).values for block in blocks]
        names = [variable.name for variable in variables if variable.kind == "trained"]
        self._given = [{name: values[name] for name in names} for values in whole]
        self._inner = cast(Inner, None)  # until it begins

    @property
    def kind(self) -> str:
        return self._inner.kind

    def begin(self) -> None:
        self._inner = inner_of(self._job.inner, self._job.model, *self._given)

    def go_on(self, step: int, learning_rate: float | None) -> None:
        with user_code("the schedule", self._job.inner):
            self._inner.go_on(step, learning_rate)

    def apply(self, report: StepReport) -> None:
        self._clip()
        with user_code("a step", self._job.inner):
            self._inner.update(report.absent)
        np.copyto(self.parameters[self._trained :], self.gradient[self._trained :])

    def state(self) -> State:
        return self._inner.state()

    def load(self, state: State) -> None:
        self._inner.load(state)

    def _clip(self) -> None:
        job, gradient = self._job, self.gradient[: self._trained]
        if (limit := job.clip_norm) is not None:
            scale = clip_scale(float(square_of(gradient, limit)), limit)
            gradient *= np.float32(scale)
        if job.clip_value is not None:
            np.clip(gradient, -job.clip_value, job.clip_value, out=gradient)
