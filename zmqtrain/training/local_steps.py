"""A worker's own parameters, which it trains by itself from one round to the next.

A round begins from the common parameters. Its result is these parameters after its batches,
written where a gradient would be; optim/outer.py applies it. The state of the
optimizer stays with the worker for as long as it is a member, or in files, if the job keeps it.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.job import Job
from zmqtrain.optim.inner import Inner
from zmqtrain.store.finite import all_finite
from zmqtrain.store.logdir import checkpoints, step_of
from zmqtrain.store.placement import place
from zmqtrain.store.weights import read, save
from zmqtrain.training.exchange import Membership, Round, StepReport
from zmqtrain.training.memory import WorkerMemory
from zmqtrain.training.own_steps import OwnSteps

_RECENT = 3
"""Newest states that are kept before their checkpoints are there."""

_KIND, _OWNER = "/kind", "/parameters"

log = logging.getLogger(__name__)


class LocalRounds:
    """The rounds of steps that one worker makes by itself, as a member of the job.

    ``memory``: the shard's, for code that computes gradients. ``reports``: those of batches that
    are applied, but not sent. A step may call all methods but :meth:`go_on` in a thread.
    """

    def __init__(
        self,
        job: Job,
        membership: Membership,
        team: ThreadTeam,
        threads: int | None,
        worker: int = 0,
    ) -> None:
        """``threads``: number that update a large model; None: one for each core."""
        self._team, self._variables = team, job.variables()
        (layout,) = place(self._variables, 1, partition_nbytes=0)
        self._of_differences = job.update().outer.of_differences
        steps = self._steps = OwnSteps(job, layout, threads)
        self._is_new = True  # the next round begins with a new state of the optimizer
        self._has_begun = False
        self.memory = Membership([layout], [steps.parameters], [steps.gradient], (), is_own=True)
        variables, layouts = self._variables, membership.layouts
        common = membership.parameters, membership.byte_state
        self._common = WorkerMemory(variables, layouts, *common)
        self._own = WorkerMemory(variables, [layout], [steps.parameters])
        self._result = WorkerMemory(variables, layouts, membership.gradients)
        self._sends_difference = self._of_differences  # of the round
        self._begin: dict[str, NDArray[Any]] = {}  # trained values then, if differences are sent
        self._batches = 0  # of the round; 0: none is under way
        self._next: Round | None = None
        keeps = job.inner_state == "keep" and job.logdir is not None
        self._states = InnerStates(Path(job.logdir or ""), worker) if keeps else None
        self.reports: list[StepReport] = []

    def go_on(self, following: Round) -> None:
        """Begin a round with the next batch, or go on with the one of which a batch was refused."""
        self._batches = following.batches
        if not self.reports:
            self._next = following

    def end(self, step: int | None) -> list[int]:
        """Go on without rounds after this step of the job, None: its parameters did not come.

        Return the batches that are applied, and have not been sent.
        """
        self._batches, reports, self.reports = 0, self.reports, []
        if step is not None and not self._is_new:
            self._take_over()
            self._save(step)
        return [report.batch for report in reports]

    @property
    def is_under_way(self) -> bool:
        return self._batches > 0

    @property
    def is_over(self) -> bool:
        """Whether all batches of the round are applied."""
        return len(self.reports) >= self._batches

    def load(self) -> None:
        """Take over the common parameters if a round begins with this batch."""
        following, self._next = self._next, None
        if following is None:
            return
        steps = self._steps
        self._take_over()
        self._sends_difference = self._of_differences or following.sends_difference
        for variable in self._variables if self._sends_difference else ():
            if variable.kind == "trained":  # others may change the common ones meanwhile
                own = self._own.values[variable.name]
                np.copyto(self._begin.setdefault(variable.name, np.empty_like(own)), own)
        if not self._is_new:
            self._save(following.step)
        else:
            steps.begin()
            if self._states is not None and not self._has_begun:  # else it is the one given up
                self._states.load(following.step, steps.parameters, steps.inner)
            self._is_new, self._has_begun = False, True
        steps.go_on(following.step, following.learning_rate)

    def _save(self, step: int) -> None:
        """Keep the state of the optimizer, if the job does: the round before this step is over."""
        if self._states is not None:
            self._states.save(step, self._steps.parameters, self._steps.inner)

    def _take_over(self) -> None:
        self._common.gather()
        for name, value in self._common.values.items():
            np.copyto(self._own.values[name], value)
        self._own.scatter()

    def apply(self, report: StepReport) -> None:
        """Apply the gradient of a batch that is finite.

        Raises:
            ConfigError: the optimizer cannot make this step.
        """
        self._steps.apply(report.absent)
        self.reports.append(report)

    def result(self) -> StepReport:
        """Write the result into the exchange's memory; return the report of all batches."""
        self._own.gather()
        for variable in self._variables:
            own, out = self._own.values[variable.name], self._result.values[variable.name]
            if self._sends_difference and variable.kind == "trained":
                np.subtract(own, self._begin[variable.name], out=out)
            else:
                np.copyto(out, own)
        self._result.scatter()
        report, self.reports = StepReport.of(self.reports), []
        report.finite = all_finite(self._steps.parameters, self._team)
        self._is_new = not report.finite  # the optimizer's state need not be finite, either
        return report


class InnerStates:
    """Files with the states of one worker's inner optimizer, each at the beginning of a round.

    Each belongs to the common parameters of its step, whose digest it has: a job that goes back to
    a checkpoint may come to the step with others. States of steps without a checkpoint are deleted
    after some rounds.
    """

    def __init__(self, logdir: Path, worker: int) -> None:
        self._logdir = logdir
        self._directory = logdir / "inner" / f"worker-{worker}"

    def save(self, step: int, parameters: Flat, inner: Inner) -> None:
        """Write the state; a failure is logged, since the training can go on without."""
        kind = np.frombuffer(inner.kind.encode(), np.uint8)
        try:
            own = {_KIND: kind, _OWNER: _digest(parameters)}
            save(self._path(step), {**inner.state(), **own})
            self._prune(step)
        except (CheckpointError, OSError) as error:
            log.warning("the state of the inner optimizer at step %d was not saved; a resume from "
                        "this step will begin with a new one: %s", step, error)  # fmt: skip

    def load(self, step: int, parameters: Flat, inner: Inner) -> None:
        """Have the optimizer take over its state of a step, if there is one."""
        path = self._path(step)
        if not path.exists():
            return
        try:
            found = read(path)
            if not np.array_equal(found.pop(_OWNER), _digest(parameters)):
                raise ValueError("it is of other parameters, of a job or of steps that are undone")
            if (saved := found.pop(_KIND).tobytes().decode()) != inner.kind:
                raise ValueError(f"it is of {saved:.80}, and this optimizer is {inner.kind:.80}")
            inner.load(found)
        except (CheckpointError, ConfigError, ValueError, LookupError, RuntimeError) as error:
            log.warning("the state of the inner optimizer is new, since %s cannot be used: %s",
                        path, error)  # fmt: skip
        else:
            log.info("the state of the inner optimizer is that of %s", path)

    def _path(self, step: int) -> Path:
        return self._directory / f"{step}.npz"

    def _prune(self, last: int) -> None:
        steps = sorted(int(path.stem) for path in self._directory.glob("*.npz"))
        earlier = [step for step in steps if step <= last]  # the others are undone
        saved = {step_of(path) for path in checkpoints(self._logdir)}
        for step in set(earlier[:-_RECENT]) - saved:
            self._path(step).unlink(missing_ok=True)


def _digest(parameters: Flat) -> NDArray[np.uint8]:
    return np.frombuffer(blake2b(parameters.data, digest_size=16).digest(), np.uint8)
