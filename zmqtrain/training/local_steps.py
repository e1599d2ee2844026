"""A worker's own parameters, which it trains by itself from one round to the next.

They are a shard in private memory, so a batch is applied as it is where one worker trains alone,
with the same bits. A round begins from the common parameters. Its result is these parameters after
its batches, written where a gradient would be; what becomes of it, says optim/outer.py. The slots
of the optimizer stay with the worker for as long as it is a member.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np

from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.job import Job
from zmqtrain.metrics import added
from zmqtrain.models.weights import weight_of, weighted_mean
from zmqtrain.optim.outer import Outer
from zmqtrain.protocol.orders import Apply
from zmqtrain.store.finite import all_finite
from zmqtrain.store.placement import place
from zmqtrain.store.shard import Shard
from zmqtrain.training.exchange import Membership, Round, StepReport
from zmqtrain.training.memory import WorkerMemory

_WORKER, _GRADIENT = 0, 0  # the shard has one of each


class LocalSteps:
    """The steps that one worker makes by itself, as a member of the job.

    ``memory``: of the shard, for the code that computes gradients. ``reports``: of the batches that
    are applied, and have not been sent. :meth:`go_on` is called between two steps; a step may call
    the other methods in a thread.
    """

    def __init__(
        self, job: Job, membership: Membership, team: ThreadTeam, threads: int | None
    ) -> None:
        """``threads``: number that update a large model; None: one for each core."""
        self._team, self._variables = team, job.variables()
        (layout,) = place(self._variables, 1, partition_nbytes=0)
        update = replace(job.update(), outer=Outer())
        self._of_differences = job.update().outer.of_differences
        shard = Shard(layout, update, threads=threads, batch_size=job.worker_batch_size)
        self._shard, self._is_new = shard, True
        gradient = shard.segment.gradient(_GRADIENT)
        self.memory = Membership([layout], [shard.parameters], [gradient], (), is_own=True)
        self._own = WorkerMemory(self._variables, [layout], [shard.parameters])
        given = self._variables, membership.layouts
        self._common = WorkerMemory(*given, membership.parameters, membership.exact)
        self._result = WorkerMemory(*given, membership.gradients)
        self._batches = 0  # of the round
        self._next: Round | None = None
        self.reports: list[StepReport] = []

    def go_on(self, following: Round) -> None:
        """Begin a round with the next batch, or go on with the one of which a batch was refused."""
        self._batches = following.batches
        if not self.reports:
            self._next = following

    @property
    def is_over(self) -> bool:
        """Whether all batches of the round are applied."""
        return len(self.reports) >= self._batches

    def load(self) -> None:
        """Take over the common parameters if a round begins with this batch."""
        following, self._next = self._next, None
        if following is None:
            return
        shard = self._shard
        self._common.gather()
        for name, value in self._common.values.items():
            np.copyto(self._own.values[name], value)
        self._own.scatter()
        # The steps of a lost ps may be repeated from a checkpoint on.
        if self._is_new or following.step < shard.version:
            shard.initialize(shard.parameters.copy())
            self._is_new = False
        shard.rest(following.step)
        shard.learning_rate = following.learning_rate

    def apply(self, report: StepReport) -> None:
        """Apply the gradient of a batch that is finite.

        Raises:
            ConfigError: the optimizer cannot make this step.
        """
        shard = self._shard
        shard.segment.note_absent(_GRADIENT, shard.layout.numbers_of(report.absent))
        shard.stage(_WORKER, _GRADIENT, weight=weight_of(report))
        shard.carry_out(Apply(_WORKER))
        self.reports.append(report)

    def result(self) -> StepReport:
        """Write the result into the exchange's memory; return the report of all batches."""
        self._own.gather()
        for variable in self._variables:
            own, out = self._own.values[variable.name], self._result.values[variable.name]
            if self._of_differences and variable.kind == "trained":
                np.subtract(own, self._common.values[variable.name], out=out)
            else:
                np.copyto(out, own)
        self._result.scatter()
        reports, self.reports = self.reports, []
        weights = [weight_of(report) for report in reports]
        return StepReport(
            reports[0].batch,
            sum(report.examples for report in reports),
            weighted_mean([report.loss for report in reports], weights),
            all_finite(self._shard.parameters, self._team),
            reduce(added, [report.sums for report in reports]),
            frozenset.intersection(*[report.absent for report in reports]),
            sum(weights),
            batches=len(reports),
        )
