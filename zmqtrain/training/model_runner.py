"""Runs a job's model on batches, with gradients in the exchange's memory: on one device here."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import Flat, read_only
from zmqtrain.compute.device import Device
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.errors import ConfigError
from zmqtrain.job import Job
from zmqtrain.models.base import Batch, Buffers, absent, as_model
from zmqtrain.models.checks import checked_loss
from zmqtrain.models.rows import RowGradient, readers_of
from zmqtrain.models.tables import RowsOf
from zmqtrain.models.trees import are_rows, leaves
from zmqtrain.models.weights import EMPTY, weights_of
from zmqtrain.optim import clip_by_global_norm
from zmqtrain.store.finite import all_finite
from zmqtrain.training.exchange import Membership, StepReport
from zmqtrain.training.measuring import StepSums
from zmqtrain.training.memory import WorkerMemory
from zmqtrain.training.write_check import WriteCheck
from zmqtrain.units import shortened

log = logging.getLogger(__name__)

UNWRITTEN = np.uint32(0x7FC05A5A)
"""Bits of a NaN that no computation makes; a sum with it keeps them."""


class Runner(ABC):
    """Runs a job's model on batches: on one device, or on several at the same time."""

    @abstractmethod
    def bind(self, membership: Membership) -> None:
        """Use the memory of this membership from now on."""

    @abstractmethod
    def place(self, batch: Batch) -> Batch:
        """Return the batch on the runner's device, if it has one."""

    def load_parameters(self) -> None:
        """Copy the parameters to where the model reads them, unless :meth:`compute` does so."""

    @abstractmethod
    def compute(self, batch: Batch, number: int, examples: int) -> StepReport:
        """Write the gradient of a batch that :meth:`place` returned into the exchange's memory.

        A gradient that is not finite may be left out.

        Raises:
            ConfigError: the model raises, returns no number, or writes a gradient of wrong shape.
        """

    def close(self) -> None:
        """End the runner's threads, after their current work."""


class ModelRunner(Runner):
    """One job's model on one device, over the memory of one membership at a time."""

    def __init__(
        self,
        job: Job,
        device: Device,
        team: ThreadTeam,
        on_written: Callable[[Sequence[str]], None],
    ) -> None:
        """``on_written``: called with names of complete gradients, if the job has ``overlap``."""
        self._job, self._model = job, as_model(job.model)
        self._device, self._team = device, team
        self._on_written = on_written
        # Complete gradients, and the tasks that wait for their copies to the host.
        self._early: list[tuple[list[str], Callable[[], None]]] = []
        self._is_empty = False  # nothing of the batch counts
        self._last_loss = 0.0  # of a batch that counts

    def bind(self, membership: Membership) -> None:
        job, device, self._membership = self._job, self._device, membership
        variables, twins = job.variables(), device.twins
        self._trained = [v.name for v in variables if v.kind == "trained"]
        self._state = [v.name for v in variables if v.kind == "state"]
        frozen = job.frozen()
        self._frozen = dict(zip(frozen, device.batch(tuple(frozen.values())), strict=True))
        parameters, state = twins(membership.parameters), twins(membership.byte_state)
        self._constants = {name: self._frozen[name] for name in job.constants()}
        self._parameters = WorkerMemory(variables, membership.layouts, parameters, state)
        own = set(self._trained) if membership.is_own else set()
        shown = {
            name: value if name in own or not isinstance(value, np.ndarray) else read_only(value)
            for name, value in self._parameters.values.items()
        }
        self._tables = job.table_variables()
        self._row_gradients = {table.name: RowGradient(table) for table in self._tables}
        self._readers = readers_of(self._tables, membership.rows)
        self._writes = WriteCheck(job.model, shown, self._frozen, self._readers)
        self._gradients = WorkerMemory(variables, membership.layouts, twins(membership.gradients))
        # By variable, for each shard: its part of the gradient on the device, and on the host.
        self._runs: dict[str, list[tuple[Flat, Flat]]] = {}
        both = zip(membership.layouts, self.gradients, membership.gradients, strict=True)
        for layout, there, here in both:
            for cut, start, stop in layout.runs:
                run = there[start:stop], here[start:stop]
                self._runs.setdefault(cut.variable.name, []).append(run)
        # A model may write its state, though it is constant.
        self._gradients.values |= {n: v.copy() for n, v in self._constants.items()}
        self._measured = StepSums(job.metrics, job.model, is_weighted=bool(job.class_weight))
        self._out = Buffers(
            {**self._gradients.values, **self._row_gradients},
            self._written if job.overlap else None,
            self._measured.add if job.has_epochs else None,
        )
        self._is_first = True
        self._bits = [self._gradients.values[n].view(np.uint32) for n in self._trained]
        for bits in self._bits:
            bits[...] = UNWRITTEN

    def place(self, batch: Batch) -> Batch:
        return self._device.batch(batch)

    @property
    def gradients(self) -> Sequence[Flat]:
        """The gradient on the device, one array of shape (layout.size,) for each shard."""
        return self._gradients.flats

    def load_parameters(self) -> None:
        self._device.load(self._membership.parameters, self._parameters.flats)
        self._device.load(self._membership.byte_state, self._parameters.byte_state)
        self._parameters.gather()

    def compute(self, batch: Batch, number: int, examples: int) -> StepReport:
        report = self.compute_on_device(batch, number, examples)
        if report.finite:
            self.store()
        return report

    def compute_on_device(self, batch: Batch, number: int, examples: int) -> StepReport:
        """Compute a batch as :meth:`compute` does, but leave the gradient on the device."""
        self._model.seed_batch(self._job.seed, number)
        weight, others = weights_of(self._model, batch, examples)
        self._is_empty = weight == EMPTY
        self._measured.begin(others)
        self._out.absent.clear()
        for reader, gradient in zip(
            self._readers.values(), self._row_gradients.values(), strict=True
        ):
            reader.begin()
            gradient.begin()
        self._early.clear()
        for name in self._state:  # a model may leave it as it is
            self._gradients.values[name][...] = self._parameters.values[name]
        parameters = self._writes.begin()

        def shapes() -> str:
            given = enumerate(batch) if are_rows(batch) else leaves(batch, "")
            trained = ((n, parameters[n]) for n in self._trained)
            return f"The batch is {_shapes(given)}; parameters are {_shapes(trained)}"

        loss = checked_loss(self._model, parameters, batch, self._out, shapes)
        for names, wait in self._early:  # before the device is waited for as a whole
            wait()
            self._on_written(names)
        self._writes.check(parameters)
        self._check_gradients()
        self._check_constants()
        if self._is_first and math.isfinite(loss):
            self._check_written()
            self._is_first = False
        if self._is_empty:  # a mean of nothing may be NaN
            loss = self._last_loss
            for name in self._trained:
                self._gradients.values[name][...] = 0
            absent(self._out, *self._trained)
        rows = self._rows()
        if self._job.clip_norm_each is not None:
            gradients = {name: self._out[name] for name in self._trained}
            gradients |= {self._tables[found.table].name: found.rows for found in rows}
            clip_by_global_norm(gradients, self._job.clip_norm_each)
        self._gradients.scatter()
        finite = math.isfinite(loss) and all(all_finite(f, self._team) for f in self.gradients)
        self._device.wait()  # the exchange may change the parameters from now on
        finite = finite and self._are_finite("the gradient of row", rows)
        if not finite:
            read = (reader.known for reader in self._readers.values())
            self._are_finite("row", [found for found in read if found is not None])
        self._last_loss = loss
        sums, absences = self._measured.sums, frozenset(self._out.absent)
        return StepReport(
            number, examples, loss, finite, sums=sums, absent=absences, weight=weight, rows=rows
        )

    def store(self) -> None:
        """Copy the rest of the gradient into the exchange's memory."""
        there = {name for names, _ in self._early for name in names}
        if there:
            self._device.store(*self._runs_of(self._runs.keys() - there))
        else:
            self._device.store(self.gradients, self._membership.gradients)

    def _runs_of(self, names: Iterable[str]) -> tuple[list[Flat], list[Flat]]:
        """Return the shards' parts of these variables' gradients: on the device, on the host."""
        runs = [run for name in names for run in self._runs.get(name, ())]
        return [there for there, _ in runs], [here for _, here in runs]

    def _written(self, values: Mapping[str, Any], names: Sequence[str]) -> None:
        """Report which gradients are complete; called by the model, in its thread."""
        if self._is_empty:
            return  # they become 0 when the model is done
        own = self._gradients.values
        # An array that replaces the buffer is copied when the model is done.
        complete = [name for name in names if name in own and values.get(name) is own[name]]
        if complete:
            self._gradients.scatter(*complete)
            wait = self._device.begin_store(*self._runs_of(complete))
            if wait is None:
                self._on_written(complete)
            else:
                self._early.append((complete, wait))

    def _check_gradients(self) -> None:
        """Check names, shapes and dtypes; copy arrays that replace their buffers into them."""
        values = self._gradients.values
        known = values.keys() | self._row_gradients.keys()
        if not self._out.keys() <= known:
            unknown = min(self._out.keys() - known, key=repr)
            raise ConfigError(
                f"{self._job.model!r} wrote a gradient of {unknown!r}, which is not a "
                f"parameter; expected {', '.join(values)}; use the names of parameters()"
            )
        for name, rows in self._row_gradients.items():
            if self._out.get(name) is not rows:
                raise ConfigError(
                    f"{self._job.model!r} replaces the gradient of the table {name!r}; expected "
                    f"rows that are added to it: out[{name!r}].add(ids, rows)"
                )
        for name, value in values.items():
            gradient = self._out.get(name)
            if gradient is value:
                continue
            if not isinstance(gradient, type(value) | np.generic) or gradient.shape != value.shape:
                raise ConfigError(
                    f"the gradient of {name!r} from {self._job.model!r} {_described(gradient)}; "
                    f"expected {value.shape}; write it into the given buffer, with out= or [...]"
                )
            if name in self._state and gradient.dtype != value.dtype:
                raise ConfigError(
                    f"the new value of {name!r} from {self._job.model!r} is {gradient.dtype}; "
                    f"expected {value.dtype}, as state() has it"
                )
            value[...] = gradient
            self._out[name] = value

    def _rows(self) -> tuple[RowsOf, ...]:
        """Return the gradient of each table with any."""
        if self._is_empty:
            return ()
        found = (gradient.result() for gradient in self._row_gradients.values())
        return tuple(rows for rows in found if rows is not None and len(rows.ids))

    def _are_finite(self, kind: str, every: Sequence[RowsOf]) -> bool:
        """Return whether all elements of these rows are finite; log the first row that is not."""
        for found in every:
            if not all_finite(found.rows.reshape(-1)):
                id_ = found.ids[np.isfinite(found.rows).all(axis=1).argmin()]
                name = self._tables[found.table].name
                log.warning("%s %d of the table %r has NaN or infinity", kind, id_, name)
                return False
        return True

    def _check_constants(self) -> None:
        """Check that the step has not changed state that began with NaN or infinity."""
        for name, before in self._constants.items():
            after = self._gradients.values[name]
            if (after.view(f"u{after.itemsize}") != before.view(f"u{before.itemsize}")).any():
                raise ConfigError(
                    f"{name!r} of {self._job.model!r} begins with NaN or infinity, and a step has "
                    "changed it; expected a constant, or finite numbers from the start: in PyTorch "
                    "call the module on a batch in build(), or register it with persistent=False"
                )

    def _check_written(self) -> None:
        """Check that the first gradient fills its buffers, which no step clears."""
        for name, bits in zip(self._trained, self._bits, strict=True):
            if (bits == UNWRITTEN).any():
                raise ConfigError(
                    f"the gradient of {name!r} from {self._job.model!r} is not written, or added "
                    "to the buffer's old values; buffers are not cleared between steps: overwrite "
                    "every element"
                )


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"is a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape else "")


def _shapes(arrays: Iterable[tuple[object, Any]]) -> str:
    return shortened([f"{name} {list(getattr(array, 'shape', ['?']))}" for name, array in arrays])
