"""PyTorch: a ``torch.nn.Module`` as a model, trained as it is.

Parameters and their ``.grad`` are views of the worker's memory, so nothing is copied on lane shm.
Variables have the names of the module's ``state_dict``. Buffers are state; parameters that need no
gradient are frozen.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.adapters.common import check_build, name_of, numbers_of
from zmqtrain.errors import ConfigError
from zmqtrain.hints import not_installed
from zmqtrain.models.base import BaseModel, Batch, Gradients, Parameters, is_measured, measured
from zmqtrain.models.checks import CheckSchedule
from zmqtrain.models.rows import TableReader
from zmqtrain.models.tables import Ids, Table
from zmqtrain.models.trees import split
from zmqtrain.models.weights import EMPTY

try:
    import torch
except ImportError as missing:
    raise not_installed("PyTorch", "torch") from missing

from zmqtrain.adapters.torch_arrays import variable_of
from zmqtrain.adapters.torch_batches import on_host, rows_of, targets_of, tensors_of
from zmqtrain.adapters.torch_lightning import configured, is_lightning, steps_of
from zmqtrain.adapters.torch_losses import takes_one_target
from zmqtrain.adapters.torch_memory import seed_torch
from zmqtrain.adapters.torch_module import BuiltModule
from zmqtrain.adapters.torch_objective import Objective
from zmqtrain.adapters.torch_outputs import arrays_of, detached, shown
from zmqtrain.adapters.torch_parts import IGNORED, PartsCheck, comparing, has_ignored, own_loss
from zmqtrain.adapters.torch_structure import buffers_of
from zmqtrain.adapters.torch_tables_of import tables_in
from zmqtrain.adapters.torch_weights import load_state_dict as load_state_dict

log = logging.getLogger(__name__)

_TRAINED = [torch.float32, torch.complex64]
if hasattr(torch.Tensor, "grad_dtype"):  # from torch 2.10 on: gradients in float32
    _TRAINED.append(torch.bfloat16)


class TorchModel(BaseModel):
    """A module, and how its loss is computed.

    Dropout and other random numbers of torch depend on the job's seed and the batch's number, so
    they are repeatable where one worker computes in a process. Instances share nothing, and each is
    for one thread at a time.
    """

    has_classes_second = True  # of outputs with more than two axes, in torch's losses

    def __init__(
        self,
        build: Callable[[], Any],
        loss: Callable[..., Any] | None = None,
        metrics: Callable[..., Mapping[str, Any]] | None = None,
        *,
        training_step: Callable[[Any, Any], Any] | None = None,
        autocast: Any = None,
        micro_batches: int = 1,
        compile: bool | Mapping[str, Any] = False,
        labels_at: int | None = None,
        predict: Callable[[Any, Any], Any] | None = None,
        weight: Callable[[Any], Any] | None = None,
    ) -> None:
        """``build()`` returns the module; the job's seed decides its initial values. Parameters of
        bfloat16 are trained in float32, complex64 as pairs of float32.

        ``loss(outputs, *targets)`` returns the mean loss: the batch's first array goes into the
        module, the others are targets; float64 becomes float32. ``metrics(outputs, *targets)``
        returns further mean measures; without it, accuracy is measured if outputs are scores
        (n, classes) and all labels are numbers of these classes. If a loss of outputs and labels
        has torch's ``reduction``, a third array of floats, shape (n,), is not passed to it: these
        are weights, and multiply the losses of the examples.

        A dict is called as Hugging Face does it, ``module(**batch)``; its parts that ``forward``
        does not take are left out if there is a ``loss``, which is ``loss(outputs, batch)`` then,
        as for batches of any other kind. Without ``loss`` the module gets the whole batch and
        returns its loss: ``outputs.loss``, ``outputs["loss"]`` or the first part of a tuple. Of a
        LightningModule its own steps and :attr:`optimizer` are used then.

        ``training_step(module, batch)`` replaces both. It returns
        the loss, or a dict of the loss and other mean measures, which ``fit`` shows; then
        ``metrics(module, batch)`` returns all measures of an evaluation.

        ``weight(batch)`` returns the weight of a batch's mean loss among others, such as the number
        of tokens that have a label; without it, it is what torch's cross_entropy or nll_loss
        divides by, or else the number of examples.

        ``labels_at``: the index of the labels in a batch, for metrics, accuracy and
        ``class_weight``; not needed if the loss takes one target.

        ``predict(module, batch)`` returns the outputs, a row for each example; the batch may be
        without labels. Without it the module gets the batch's first array; if it returns a dict or
        a dataclass, ``logits`` are its outputs, or its only tensor.

        ``autocast``: torch.bfloat16 to compute in it; parameters stay float32. ``micro_batches``:
        number of parts of a batch, computed one after another to save memory; the loss must be a
        mean with that weight, which is checked. ``compile``: whether the module is compiled,
        or the options of ``module.compile()``.

        Raises:
            ConfigError: the arguments do not fit together.
        """
        check_build(build, torch.nn.Module)
        if autocast not in (None, torch.bfloat16):
            raise ConfigError(
                f"autocast is {autocast!r}; expected torch.bfloat16 or None: float16 would need "
                "its loss scaled"
            )
        if type(micro_batches) is not int or micro_batches < 1:
            raise ConfigError(f"micro_batches is {micro_batches!r}; expected a number from 1 on")
        self.build, self.loss, self._compile = build, loss, compile
        self.labels_at = 1 if labels_at is None and takes_one_target(loss) else labels_at
        self._objective = Objective(
            self, loss, training_step, metrics, predict, weight, self.labels_at
        )
        self.weighs_measures = self._objective.weighs_measures
        self._autocast, self._micro_batches = autocast, micro_batches
        self._patterns: tuple[Any, ...] = ()  # of the names of tables
        self._forget()

    def _forget(self) -> None:
        self._built = BuiltModule(self.build, self._compile, self, self._take_over, self._patterns)
        self._parts = self._parts_check() if self._micro_batches > 1 else None
        self._labels_check: CheckSchedule | None = CheckSchedule()  # until it has warned

    def _take_over(self, module: Any) -> None:
        """Use a LightningModule's own steps, if no function of the user's computes the loss."""
        given = self._objective
        if given.loss is None and given.training_step is None and is_lightning(module):
            step, metrics, predict = steps_of(module)
            others: Any = {"metrics": given.metrics or metrics, "predict": given.predict or predict}
            self._objective = replace(given, training_step=step, **others)

    def __repr__(self) -> str:
        options = [f", autocast={self._autocast}"] if self._autocast else []
        options += [f", micro_batches={self._micro_batches}"] if self._micro_batches > 1 else []
        return f"TorchModel({name_of(self.build)}{''.join(options)})"

    def __deepcopy__(self, memo: object) -> TorchModel:
        other = copy.copy(self)  # a module has one place in memory
        other._objective = replace(self._objective, owner=other)
        other._forget()
        return other

    @property
    def module(self) -> Any:
        """The module; during a step its parameters are the worker's memory."""
        return self._built.module

    def new_module(self) -> Any:
        """Return another module of ``build``."""
        return copy.deepcopy(self).module

    def parameters(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Return the parameters that need a gradient.

        Raises:
            ConfigError: one has a dtype that is not trained, or ``build`` returns no module.
        """
        found = {n: p for n, p in self._built.initial(seed).named_parameters() if p.requires_grad}
        for name, parameter in found.items():
            if parameter.dtype not in _TRAINED:
                raise ConfigError(
                    f"parameter {name!r} of {self!r} is {parameter.dtype}; expected one of "
                    f"{', '.join(map(str, _TRAINED))}: build it in float32, and give "
                    "autocast=torch.bfloat16 to compute in 16 bits"
                )
        return {name: variable_of(parameter) for name, parameter in found.items()}

    def make_tables(self, patterns: Sequence[Any]) -> None:
        if tuple(patterns) != self._patterns:
            self._patterns = tuple(patterns)
            self._forget()

    def tables(self, seed: int) -> dict[str, Table]:
        """Return the weights of look-ups with ``sparse=True``, and those that the job makes tables.

        Raises:
            ConfigError: a weight cannot be a table.
        """
        return tables_in(self._built.initial(seed))

    def frozen(self, seed: int) -> dict[str, NDArray[Any]]:
        """Return the parameters that need no gradient."""
        parameters = self._built.initial(seed).named_parameters()
        return {name: variable_of(p) for name, p in parameters if not p.requires_grad}

    def state(self, seed: int) -> dict[str, NDArray[Any]]:
        """Return the buffers that are in the ``state_dict``."""
        return {name: variable_of(value) for name, value in buffers_of(self._built.initial(seed))}

    def aliases(self) -> dict[str, str]:
        first: dict[int, str] = {}
        module, found = self.module, {}
        for every in (module.named_parameters, module.named_buffers):
            for name, tensor in every(remove_duplicate=False):
                if first.setdefault(id(tensor), name) != name:
                    found[name] = first[id(tensor)]
        return found

    @property
    def optimizer(self) -> Any:
        """The optimizer that a LightningModule configures, for a job that names none; else None."""
        return configured if is_lightning(self.module) else None

    def seed_batch(self, seed: int, batch: int) -> None:
        seed_torch(seed, batch)

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        tensors = self.begin(parameters, batch, out, in_place=True)
        total = torch.zeros((), device=self._built.device)
        parts = [tensors]
        if self._micro_batches > 1:
            size = -(-rows_of(tensors) // self._micro_batches)
            parts = split(tensors, None, size, "micro_batches")
        self._begin_parts(parts)
        weights = [self._objective.weight_of(part) or rows_of(part) for part in parts]
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True), start=1):
            self._built.bound.is_last_part = number == len(parts)
            with self._autocasting(), self._built.keeping_shapes():
                loss, outputs, measures = self._objective.loss_of(self.module, part)
                self._check_part(outputs, part, len(parts))
            if weight != EMPTY:
                share = weight / sum(weights)
                (loss if share == 1 else loss * share).backward()
                total = total + share * loss.detach()
            if is_measured(out):
                examples = weight if self.weighs_measures else rows_of(part)
                self._report(out, examples if len(parts) > 1 else None, part, outputs, measures)
        if set(weights) == {EMPTY}:
            self._built.bound.rest()
        return self.finish(total)

    def weight(self, batch: Batch) -> float | None:
        tensors = self._as_tensors(batch)
        weight = self._objective.weight_of(tensors)
        check = self._labels_check
        if weight is None and check is not None and check.is_due() and has_ignored(tensors):
            self._labels_check = None
            log.warning(
                "batches of %r have labels of %d, which a loss may leave out, and no known weight; "
                "workers, devices and evaluations then average by examples: give TorchModel("
                "weight=lambda batch: ...) that returns the number by which the loss divides",
                self,
                IGNORED,
            )
        return weight

    def hold(self, parameters: Parameters, out: Gradients | None) -> None:
        """Have the module hold these values."""
        self._built.bind(parameters, out)

    def refresh(self) -> None:
        self._built.bound.load_low_precision()

    def keep_tables(self, readers: Mapping[str, TableReader]) -> None:
        self._built.tables.restore(readers)

    def look_ahead(self, batch: Batch) -> Mapping[str, Ids]:
        return self._built.tables.look_ahead(batch)

    def begin(
        self, parameters: Parameters, batch: Batch, out: Gradients, *, in_place: bool = False
    ) -> Any:
        """Make the module ready for a step; return the batch as tensors."""
        self._built.bind(parameters, out)
        self._built.bound.clear(in_place=in_place)
        tensors = self._as_tensors(batch)
        self._built.tables.begin(tensors)
        return tensors

    def finish(self, loss: Any) -> float:
        """End a step after ``backward()``: gradients and buffers are complete; return the loss.

        Raises:
            ConfigError: a gradient is sparse, a parameter was changed that the step may only read,
                or a parameter or buffer has appeared in the step.
        """
        self._built.check()
        self._built.bound.complete(has_others=self._built.tables.complete())
        return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        with self._evaluating(parameters, batch) as tensors:
            return numbers_of(self._objective.measures_of(self.module, tensors), self)

    def predict(self, parameters: Parameters, batch: Batch) -> Any:
        """Return the outputs, see ``predict`` of the constructor; a tuple if there are several.

        Raises:
            ConfigError: they are not tensors, or it is unknown which arrays go into the module.
        """
        module = self.module  # its own steps may be the objective's
        call, inputs = self._objective.prediction(batch)
        with self._evaluating(parameters, inputs) as tensors:
            outputs = call(module, tensors)
        arrays = arrays_of(outputs)
        if arrays is None:
            raise ConfigError(
                f"{self!r} predicts {shown(outputs)}; expected a tensor, a tuple of tensors, or "
                "logits among several; give TorchModel(predict=lambda module, batch: ...)"
            )
        return arrays

    @contextmanager
    def profiling(self, path: Path) -> Iterator[None]:
        with torch.profiler.profile(record_shapes=True, with_stack=True) as trace:
            yield
        trace.export_chrome_trace(str(path.with_suffix(".pt.trace.json")))

    def _parts_check(self) -> PartsCheck:
        tolerance = 1e-4 if self.loss is not None else 1e-3  # of a loss, or a whole step
        return PartsCheck(self, self._objective.weight_of, 2e-2 if self._autocast else tolerance)

    def _begin_parts(self, parts: Sequence[tuple[Any, ...]]) -> None:
        """Check that the parts of a batch count as in the whole batch, if a whole step computes
        their losses.

        Raises:
            ConfigError: the loss is not a mean over examples.
        """
        check = self._parts
        if check is None:
            return
        check.begin()
        if self.loss is not None or not check.is_due(list(parts)):
            return
        self._built.bound.is_last_part = False
        for part in parts:
            with comparing(self.module), self._autocasting():
                of = lambda rows: self._objective.loss_of(self.module, *rows)[0]  # noqa: E731
                check.check(of, (part,), rows_of(part), len(parts))
        self._built.bound.load()  # the comparison may have changed state
        self._built.bound.clear()

    def _check_part(self, outputs: Any, part: tuple[Any, ...], parts: int) -> None:
        """Check the same for the outputs of a part, if ``loss`` computes the loss."""
        check, loss = self._parts, self.loss
        if check is None or loss is None or not check.is_due(targets_of(part)):
            return
        with comparing(self.module):
            of = partial(self._objective.loss_by, own_loss(loss))
            check.check(lambda rows: of(*rows), (outputs, part), rows_of(part), parts)

    def _report(
        self, out: Gradients, examples: float | None, batch: Any, outputs: Any, measures: Any
    ) -> None:
        """Report the measures of a part of the step's batch; ``examples``: None for all of it."""
        with torch.no_grad(), self._autocasting():
            if outputs is not None:
                outputs = detached(outputs)
                measures = self._objective.beside_loss(outputs, batch)
            measures = {name: detached(value) for name, value in measures.items()}

        def given() -> Any:
            arrays = arrays_of(outputs)
            return None if arrays is None else (arrays, on_host(batch))

        measured(out, examples, numbers_of(measures, self), given)

    @contextmanager
    def _evaluating(self, parameters: Parameters, batch: Batch) -> Iterator[Any]:
        """Yield the batch as tensors, with the module in eval mode and no gradients."""
        self._built.bind(parameters, None)
        with self._built.resting():
            tensors = self._as_tensors(batch)
            self._built.tables.begin(tensors)
            with torch.no_grad(), self._autocasting():
                yield tensors
            self._built.tables.end()

    def _as_tensors(self, batch: Batch) -> Any:
        return tensors_of(batch, self._built.device, is_double=self._built.is_double)

    def _autocasting(self) -> Any:
        kind = self._built.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self._autocast is not None)
