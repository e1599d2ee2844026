"""Several devices of one process: a tower each, and the mean of their gradients.

A tower is one device with a thread, a copy of the model and a gradient of its own; the parameters
are the worker's. A batch is cut in the order of the devices. The gradients are added up in this
order, by the arithmetic with which a shard adds up the workers' gradients: the same number of
workers under ``sync-replicas`` ends with the same parameters, bit for bit. So are gradients of
rows. With the exchange nccl dense gradients are added up on the GPUs, in NCCL's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from zmqtrain.compute.arrays import Flat, zeros
from zmqtrain.compute.device import make_device
from zmqtrain.compute.nccl import Nccl
from zmqtrain.compute.threads import Shares, ThreadTeam
from zmqtrain.errors import ZmqTrainError
from zmqtrain.job import Job
from zmqtrain.models.base import Batch
from zmqtrain.models.tables import RowsOf
from zmqtrain.models.trees import copied, split
from zmqtrain.models.weights import weight_of
from zmqtrain.optim import Update
from zmqtrain.optim.mean import Assign, Mean
from zmqtrain.optim.merge import Term, merged
from zmqtrain.store.segment_layout import cut
from zmqtrain.training.exchange import Membership, StepReport
from zmqtrain.training.model_runner import ModelRunner, Runner

Result = TypeVar("Result")


class Towers(Runner):
    """Runs a job's model on all devices of the job, over the memory of one membership."""

    def __init__(self, job: Job, team: ThreadTeam) -> None:
        """``team``: threads that add up large gradients.

        Raises:
            ConfigError: a device or NCCL cannot be used, or the model cannot be copied.
        """
        self._job, self._team = job, team
        self._nccl: Nccl | None = None
        self._membership: Membership
        self._runners: list[ModelRunner] = []  # of this membership
        self._folds: list[Callable[[Sequence[float]], None]] = []
        self._threads = [ThreadPoolExecutor(1, name) for name in job.devices]
        self._shares = Shares(len(job.devices))
        try:
            self._jobs = [job.with_own_model() for _ in job.devices]
            self._on_all([self._shares.take] * len(job.devices))
            self._devices = self._on_all(
                [partial(make_device, name, "--devices") for name in job.devices]
            )
            if job.exchange == "nccl":
                self._nccl = Nccl([int(name.partition(":")[2]) for name in job.devices])
        except BaseException:
            self.close()
            raise

    def bind(self, membership: Membership) -> None:
        self._membership, self._runners = membership, []

    def place(self, batch: Batch) -> Batch:
        return batch  # each tower places its part

    def _build(self, membership: Membership) -> None:
        """Build each tower's model over its memory; that of the first is the exchange's."""
        self._folds = []
        gradients = [membership.gradients] * len(self._jobs)  # on GPUs: only the first is copied
        if self._nccl is None:
            gradients[1:] = [[zeros(len(flat)) for flat in gradients[0]] for _ in gradients[1:]]
        for job, thread, device, own in zip(
            self._jobs, self._threads, self._devices, gradients, strict=True
        ):
            # One after another: frameworks build a model with generators of the whole process.
            thread.submit(job.initial_parameters, empty=True).result()
            memory = replace(membership, gradients=own, is_own=False)
            runner = ModelRunner(job, device, self._team, _nothing)
            thread.submit(runner.bind, memory).result()
            self._runners.append(runner)
        if self._nccl is not None:
            return
        for layout, *flats in zip(membership.layouts, *gradients, strict=True):
            parts = cut(layout.averaged)
            self._folds += [_fold_of([flat[part] for flat in flats]) for part in parts]

    def compute(self, batch: Batch, number: int, examples: int) -> StepReport:
        """Write the mean gradient of all towers; errors name the device."""
        if not self._runners:
            self._build(self._membership)
        size = self._job.batch_size
        parts = split(batch, examples, size, "devices")
        counts = [min(size, examples - start) for start in range(0, examples, size)]
        first = number * len(self._runners)  # as if each part were a worker's batch
        towers = self._on_all(
            [partial(self._compute, n, part, first + n, counts[n]) for n, part in enumerate(parts)]
        )
        report = replace(StepReport.of(towers), batch=number, batches=1)
        if report.finite:
            weights = [weight_of(tower) for tower in towers]
            if self._nccl is not None:
                self._reduce(self._nccl, weights)
            elif len(parts) > 1:
                self._team.run([partial(fold, weights) for fold in self._folds])
            report.rows = _mean_rows([tower.rows for tower in towers], weights)
        return report

    def close(self) -> None:
        """End the threads, after their current work."""
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None
        self._shares.end()

    def _compute(self, tower: int, batch: Batch, number: int, examples: int) -> StepReport:
        """Compute one part, in its tower's thread."""
        runner, name = self._runners[tower], self._job.devices[tower]
        # Products of matrices may have other bits where memory is not aligned, as in a part.
        batch = runner.place(copied(batch))
        runner.load_parameters()
        try:
            if self._nccl is not None:
                return runner.compute_on_device(batch, number, examples)
            return runner.compute(batch, number, examples)
        except ZmqTrainError as error:
            batch_number = number // len(self._runners)
            raise type(error)(f"on device {name}, in batch {batch_number}: {error}") from error

    def _reduce(self, nccl: Nccl, given: Sequence[float]) -> None:
        """Write the mean, as :func:`_fold_of` makes it, from the GPUs into the exchange's memory.

        A GPU that had nothing to compute holds an old gradient, which must not count.
        """
        averaged = [layout.averaged for layout in self._membership.layouts]
        arrays = [
            [flat[:size] for flat, size in zip(runner.gradients, averaged, strict=True) if size]
            for runner in self._runners
        ]
        if len(given) > 1:
            weights = [*given, *[0.0] * (len(arrays) - len(given))]
            unit = max(weights)
            scaled = zip(arrays, [each / unit for each in weights], strict=True)
            self._on_all([partial(_scale, *both) for both in scaled])
            self._on_first(partial(nccl.reduce, arrays))
            self._on_first(partial(_scale, arrays[0], 1 / (sum(weights) / unit)))
        self._on_first(self._runners[0].store)

    def _on_first(self, call: Callable[[], None]) -> None:
        """Make the call in the thread of the first tower."""
        self._threads[0].submit(call).result()

    def _on_all(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Make each call in its tower's thread, to its end; the first device's error counts."""
        futures: list[Future[Result]] = []
        try:
            for thread, call in zip(self._threads, calls, strict=False):
                futures.append(thread.submit(call))
        finally:
            wait(futures)
        return [future.result() for future in futures]


def _fold_of(gradients: Sequence[Flat]) -> Callable[[Sequence[float]], None]:
    """Return a function that replaces the first by the mean of as many as it gets weights."""
    update = Update(Assign(), fused=False).bind(gradients[0], {})
    return lambda weights: update.apply(Mean.of(gradients[: len(weights)], weights), 0)


def _mean_rows(towers: Sequence[Sequence[RowsOf]], weights: Sequence[float]) -> tuple[RowsOf, ...]:
    """Return the mean of gradients of rows with these weights, in the order of the tables."""
    if len(towers) == 1:
        return tuple(towers[0])
    unit, found = max(weights), []
    terms: dict[int, list[Term]] = {}
    for rows, weight in zip(towers, weights, strict=True):
        for each in rows:
            unknown = np.full(len(each.ids), -1)
            term = Term(each.ids, each.rows, weight / unit, unknown)
            terms.setdefault(each.table, []).append(term)
    for table in sorted(terms):
        ids, total, _ = merged(terms[table], len(towers))
        flat = total.reshape(-1)
        mean = Mean([flat], sum(weights) / unit)
        Update(Assign(), fused=False).bind(flat, {}).apply(mean, 0)
        found.append(RowsOf(table, ids, flat.reshape(total.shape)))
    return tuple(found)


def _scale(arrays: Sequence[Flat], factor: float) -> None:
    for array in arrays:
        if factor == 0:
            array.fill(0)  # a product with NaN or infinity would be NaN
        elif factor != 1:
            array *= np.float32(factor)


def _nothing(names: Sequence[str]) -> None:
    """Ignore complete gradients: their mean is complete when all towers are done."""
