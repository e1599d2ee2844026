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
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from zmqtrain.adapters.common import check_build, name_of, numbers_of, weights_of
from zmqtrain.errors import ConfigError, not_installed
from zmqtrain.models.base import BaseModel, Batch, Gradients, Parameters, is_measured, measured
from zmqtrain.models.trees import split
from zmqtrain.models.weights import EMPTY, checked_weight
from zmqtrain.units import shortened
from zmqtrain.user_code import described, user_code

try:
    import torch
except ImportError as missing:
    raise not_installed("PyTorch", "torch") from missing

from zmqtrain.adapters.torch_batches import (
    on_host,
    outputs_of,
    rows_of,
    targets_of,
    tensors_of,
)
from zmqtrain.adapters.torch_lightning import configured, is_lightning, steps_of
from zmqtrain.adapters.torch_losses import (
    are_classes,
    class_weights_of,
    denominator_of,
    has_weights,
    loss_in,
    reduction_of,
    takes_one_target,
    weighted_loss,
)
from zmqtrain.adapters.torch_memory import (
    SAME_SHAPE,
    BoundVariables,
    array_of,
    seed_torch,
    tensor_over,
)
from zmqtrain.adapters.torch_outputs import arrays_of, detached, shown
from zmqtrain.adapters.torch_parts import PartsCheck, comparing, own_loss
from zmqtrain.adapters.torch_structure import Structure, buffers_of, check_apart

log = logging.getLogger(__name__)

_BUILT: WeakSet[Any] = WeakSet()  # modules that instances train


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
        """``build()`` returns the module; the job's seed decides its initial values.

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
        if loss is not None and training_step is not None:
            raise ConfigError(
                "TorchModel got both loss(outputs, targets) and training_step(module, batch); "
                "expected one, or neither for a module that returns its loss: leave one out"
            )
        if reduction_of(loss) == "sum":
            raise ConfigError(
                f"the loss {loss} adds up the losses of its examples, so it depends on the size "
                'of a batch; expected a mean over examples: reduction="mean"'
            )
        if autocast not in (None, torch.bfloat16):
            raise ConfigError(
                f"autocast is {autocast!r}; expected torch.bfloat16 or None: float16 would need "
                "its loss scaled"
            )
        if type(micro_batches) is not int or micro_batches < 1:
            raise ConfigError(f"micro_batches is {micro_batches!r}; expected a number from 1 on")
        self.build, self.loss, self._metrics = build, loss, metrics
        self._training_step, self._predict, self._weight = training_step, predict, weight
        self.weighs_measures = weight is not None or class_weights_of(loss) is None
        self.labels_at = 1 if labels_at is None and takes_one_target(loss) else labels_at
        self._autocast, self._micro_batches, self._compile = autocast, micro_batches, compile
        self._forget()

    def _forget(self) -> None:
        self._module: Any = None
        self._initial_seed: int | None = None  # while the module has its initial values
        self._bound = BoundVariables(self)
        self._parts = self._parts_check() if self._micro_batches > 1 else None
        self._structure: Structure | None = None  # of the module
        self._is_double, self._device = False, torch.device("cpu")
        self._is_rest_checked = False

    def __repr__(self) -> str:
        options = [f", autocast={self._autocast}"] if self._autocast else []
        options += [f", micro_batches={self._micro_batches}"] if self._micro_batches > 1 else []
        return f"TorchModel({name_of(self.build)}{''.join(options)})"

    def __deepcopy__(self, memo: object) -> TorchModel:
        other = copy.copy(self)  # a module has one place in memory
        other._forget()
        return other

    @property
    def module(self) -> Any:
        """The module; during a step its parameters are the worker's memory."""
        return self._module if self._module is not None else self._initial(0)

    def parameters(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Return the parameters that need a gradient.

        Raises:
            ConfigError: one is not float32, or ``build`` returns no module.
        """
        found = {n: p for n, p in self._initial(seed).named_parameters() if p.requires_grad}
        for name, parameter in found.items():
            if parameter.dtype != torch.float32:
                remedy = "build it in float32, and give autocast=torch.bfloat16 to compute in it"
                if parameter.is_complex():
                    remedy = "keep torch.view_as_real of it, and view_as_complex in forward"
                raise ConfigError(
                    f"parameter {name!r} of {self!r} is {parameter.dtype}; expected torch.float32: "
                    f"{remedy}"
                )
        return {name: array_of(parameter) for name, parameter in found.items()}

    def frozen(self, seed: int) -> dict[str, NDArray[Any]]:
        """Return the parameters that need no gradient."""
        parameters = self._initial(seed).named_parameters()
        return {name: array_of(p) for name, p in parameters if not p.requires_grad}

    def state(self, seed: int) -> dict[str, NDArray[Any]]:
        """Return the buffers that are in the ``state_dict``."""
        return {name: array_of(buffer) for name, buffer in buffers_of(self._initial(seed))}

    def aliases(self) -> dict[str, str]:
        """Return a variable's first name by each of its other ones: those of tied weights."""
        first: dict[int, str] = {}
        module, found = self.module, {}
        for every in (module.named_parameters, module.named_buffers):
            for name, tensor in every(remove_duplicate=False):
                if first.setdefault(id(tensor), name) != name:
                    found[name] = first[id(tensor)]
        return found

    @property
    def optimizer(self) -> Any:
        """What a LightningModule configures, for a job without an optimizer; None: nothing."""
        return configured if is_lightning(self.module) else None

    def seed_batch(self, seed: int, batch: int) -> None:
        seed_torch(seed, batch)

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        tensors = self.begin(parameters, batch, out, in_place=True)
        total = torch.zeros((), device=self._device)
        parts = [tensors]
        if self._micro_batches > 1:
            size = -(-rows_of(tensors) // self._micro_batches)
            parts = split(tensors, None, size, "micro_batches")
        self._begin_parts(parts)
        weights = [self._known_weight(part) or rows_of(part) for part in parts]
        for number, part in enumerate(parts, start=1):
            self._bound.is_last_part = number == len(parts)
            with self._autocasting(), _keeping_shapes(self):
                loss, outputs, measures = self._loss_of(part)
                self._check_part(outputs, part, len(parts))
            if weights[number - 1] != EMPTY:
                share = weights[number - 1] / sum(weights)
                (loss if share == 1 else loss * share).backward()
                total = total + share * loss.detach()
            if is_measured(out):
                examples = weights[number - 1] if self.weighs_measures else rows_of(part)
                self._report(out, examples if len(parts) > 1 else None, part, outputs, measures)
        if set(weights) == {EMPTY}:
            self._bound.rest()
        return self.finish(total)

    def weight(self, batch: Batch) -> float | None:
        """Return the weight of a batch's mean loss; None: the number of its examples."""
        return self._known_weight(self._as_tensors(batch))

    def hold(self, parameters: Parameters, out: Gradients | None) -> None:
        """Have the module hold these values."""
        self._bind(parameters, out)

    def begin(
        self, parameters: Parameters, batch: Batch, out: Gradients, *, in_place: bool = False
    ) -> Any:
        """Make the module ready for a step; return the batch as tensors."""
        self._bind(parameters, out)
        self._bound.clear(in_place=in_place)
        return self._as_tensors(batch)

    def finish(self, loss: Any) -> float:
        """End a step after ``backward()``: gradients and buffers are complete; return the loss.

        Raises:
            ConfigError: a gradient is sparse, a parameter was changed that the step may only read,
                or a parameter or buffer has appeared in the step.
        """
        self._check_structure()
        self._bound.complete()
        return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        with self._evaluating(parameters, batch) as tensors:
            return numbers_of(self._measures_of(tensors), self)

    def predict(self, parameters: Parameters, batch: Batch) -> Any:
        """Return the outputs, see ``predict`` of the constructor; a tuple if there are several.

        Raises:
            ConfigError: they are no tensors, or nothing says which arrays go into the module.
        """
        call, inputs = self._predict, batch
        if call is None:
            self._check_inputs(batch)
            call = partial(outputs_of, is_whole=self.loss is None)
            inputs = batch[:1] if isinstance(batch, tuple) else batch
        with self._evaluating(parameters, inputs) as tensors:
            outputs = call(self._module, tensors)
        arrays = arrays_of(outputs)
        if arrays is None:
            raise ConfigError(
                f"{self!r} predicts {shown(outputs)}; expected a tensor, a tuple of tensors, or "
                "logits among several; give TorchModel(predict=lambda module, batch: ...)"
            )
        return arrays

    def _check_inputs(self, batch: Batch) -> None:
        """
        Raises:
            ConfigError: several arrays go into the module, or may.
        """
        inputs = self.labels_at or len(batch) - 1
        if self._training_step is not None and inputs > 1:
            raise ConfigError(
                f"a batch of {self!r} has {len(batch)} arrays, and only its training_step knows "
                "which go into the module; give TorchModel(predict=lambda module, batch: "
                "module(...)), or labels_at=1 if the first one does"
            )

    @contextmanager
    def profiling(self, path: Path) -> Iterator[None]:
        with torch.profiler.profile(record_shapes=True, with_stack=True) as trace:
            yield
        trace.export_chrome_trace(str(path.with_suffix(".pt.trace.json")))

    def _loss_of(self, batch: tuple[Any, ...]) -> tuple[Any, Any, Mapping[str, Any]]:
        """Return the loss, the outputs (None if they are not known) and other measures."""
        outputs: Any = None
        measures: Mapping[str, Any] = {}
        if self._training_step is not None:
            loss = self._training_step(self._module, batch)
            if isinstance(loss, Mapping):
                measures, loss = loss, loss.get("loss")
        else:
            outputs = outputs_of(self._module, batch, is_whole=self.loss is None)
            loss = self._loss_by(self.loss, outputs, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a {type(loss).__name__}"
            if isinstance(loss, torch.Tensor):
                found = f"of shape {list(loss.shape)}, requires_grad={loss.requires_grad}"
            raise ConfigError(
                f"the loss of {self!r} is {found}; expected a tensor of one number that depends on "
                "the parameters: return the mean over the batch, before item() or detach()"
            )
        return loss, outputs, measures

    def _loss_by(self, loss: Any, outputs: Any, batch: Any) -> Any:
        """Return the mean loss, computed by ``loss``; None: by the module."""
        if loss is None:
            return loss_in(outputs, self)
        return weighted_loss(loss, outputs, *targets_of(batch))

    def _known_weight(self, batch: Any) -> float | None:
        """Return the weight of tensors; None: the number of examples."""
        if self._weight is None:
            found = denominator_of(self.loss, targets_of(batch))
            return None if found is None else checked_weight(found, self)
        with torch.no_grad(), user_code("weight()", self):
            return checked_weight(self._weight(batch), self)

    def _parts_check(self) -> PartsCheck:
        tolerance = 1e-4 if self.loss is not None else 1e-3  # of a loss, or a whole step
        return PartsCheck(self, self._known_weight, 2e-2 if self._autocast else tolerance)

    def _begin_parts(self, parts: Sequence[tuple[Any, ...]]) -> None:
        """Check that the parts of a batch count as in the whole batch, if a whole step computes
        their losses.

        Raises:
            ConfigError: the loss is no mean over examples.
        """
        check = self._parts
        if check is None:
            return
        check.begin()
        if self.loss is not None or not check.is_due(()):
            return
        self._bound.is_last_part = False
        for part in parts:
            with comparing(self._module), self._autocasting():
                of = lambda rows: self._loss_of(*rows)[0]  # noqa: E731
                check.check(of, (part,), rows_of(part), len(parts))
        self._bound.load()  # the comparison may have changed state
        self._bound.clear()

    def _check_part(self, outputs: Any, part: tuple[Any, ...], parts: int) -> None:
        """Check the same for the outputs of a part, if ``loss`` computes the loss."""
        check = self._parts
        if check is None or self.loss is None or not check.is_due(targets_of(part)):
            return
        loss = own_loss(self.loss)
        with comparing(self._module):
            of = partial(self._loss_by, loss)
            check.check(lambda rows: of(*rows), (outputs, part), rows_of(part), parts)

    def _report(
        self, out: Gradients, examples: float | None, batch: Any, outputs: Any, measures: Any
    ) -> None:
        """Report the measures of a part of the step's batch; ``examples``: None for all of it."""
        with torch.no_grad(), self._autocasting():
            if outputs is not None:
                outputs = detached(outputs)
                measures = self._beside_loss(outputs, *targets_of(batch))
            measures = {name: detached(value) for name, value in measures.items()}

        def given() -> Any:
            arrays = arrays_of(outputs)
            return None if arrays is None else (arrays, on_host(batch))

        measured(out, examples, numbers_of(measures, self), given)

    def _measures_of(self, batch: tuple[Any, ...]) -> Mapping[str, Any]:
        if self._training_step is not None:
            if self._metrics is not None:
                return self._metrics(self._module, batch)
            found = self._training_step(self._module, batch)
            return found if isinstance(found, Mapping) else {"loss": found}
        outputs = outputs_of(self._module, batch, is_whole=self.loss is None)
        loss = self._loss_by(self.loss, outputs, batch)
        return {"loss": loss} | self._beside_loss(outputs, *targets_of(batch))

    def _beside_loss(self, outputs: Any, *targets: Any) -> dict[str, Any]:
        if has_weights(self.loss, targets):
            targets = targets[:1]
        if self._metrics is not None:
            return dict(self._metrics(outputs, *targets))
        at = 1 if self.labels_at is None and len(targets) == 1 else self.labels_at
        is_one = at and at <= len(targets) and isinstance(targets[at - 1], torch.Tensor)
        if is_one and are_classes(outputs, targets[at - 1]):
            return {"accuracy": (outputs.argmax(1) == targets[at - 1]).float().mean()}
        return {}

    @contextmanager
    def _evaluating(self, parameters: Parameters, batch: Batch) -> Iterator[tuple[Any, ...]]:
        """Yield the batch as tensors, with the module in eval mode and no gradients."""
        self._bind(parameters, None)
        modes = [(module, module.training) for module in self._module.modules()]
        self._rest([module for module, _ in modes])
        try:
            tensors = self._as_tensors(batch)
            with torch.no_grad(), self._autocasting():
                yield tensors
        finally:
            self._module.train()
            for module, is_training in modes:
                module.training = is_training

    def _rest(self, modules: Sequence[Any]) -> None:
        """Set the module to eval mode; the first time, check its own ``eval()``.

        Raises:
            ConfigError: it changes parameters.
        """
        usual = torch.nn.Module.train, torch.nn.Module.eval
        is_own = any((type(module).train, type(module).eval) != usual for module in modules)
        before = self._bound.digests() if is_own and not self._is_rest_checked else []
        self._module.eval()
        if before and self._bound.digests() != before:
            self._module.train()  # which takes the change back
            raise ConfigError(
                f"eval() of {self!r} changes parameters, which other tasks use too; expected a "
                "module that only reads them, such as LoRA layers with merge_weights=False"
            )
        self._is_rest_checked = True

    def _as_tensors(self, batch: Batch) -> Any:
        return tensors_of(batch, self._device, is_double=self._is_double)

    def _autocasting(self) -> Any:
        kind = self._device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self._autocast is not None)

    def _initial(self, seed: int) -> Any:
        """Return a module with the initial values of a seed; the first one is kept for steps."""
        if self._initial_seed == seed:
            return self._module
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = self.build()
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(
                f"build of {self!r} returned {module!r:.80}; expected a torch.nn.Module"
            )
        if self._module is None:
            if module in _BUILT:  # build returns one that another instance trains
                module = copy.deepcopy(module)
            _BUILT.add(module)
            check_apart(module, self)
            if self.loss is None and self._training_step is None and is_lightning(module):
                self._training_step, metrics, predict = steps_of(module)
                self._metrics, self._predict = self._metrics or metrics, self._predict or predict
            self._module, self._initial_seed = module, seed
            self._train(module)
            self._structure = Structure(module, self)
            if self._compile:
                module.compile(**({} if self._compile is True else self._compile))
        return module

    def _train(self, module: Any) -> None:
        """Set a new module to train mode; parts that alone are in eval mode stay so."""
        if not module.training:
            module.train()
        elif resting := [name for name, part in module.named_modules() if not part.training]:
            log.warning(
                "build of %r leaves parts in eval mode: %s; they have no dropout and keep their "
                "statistics, unless build() calls train()",
                self,
                shortened(resting),
            )

    def _bind(self, parameters: Parameters, out: Gradients | None) -> None:
        """Make the module's parameters and buffers those of this memory; load the buffers.

        Without ``out`` for an evaluation.
        """
        if self._bound.rebind(parameters, out):
            module, self._initial_seed = self.module, None
            self._check_structure()
            first = tensor_over(next(iter(parameters.values())))
            self._is_double = first.dtype == torch.float64  # in `zmqtrain check`
            self._device = first.device
            module.to(first.device)
            for name, parameter in module.named_parameters():
                if name in parameters:
                    self._bound.add_parameter(name, parameter)
            for name, _ in buffers_of(module):
                if name in parameters:
                    path, _, attribute = name.rpartition(".")
                    self._bound.add_state(name, module.get_submodule(path), attribute)
        self._bound.load()

    def _check_structure(self) -> None:
        assert self._structure is not None
        self._structure.check()


@contextmanager
def _keeping_shapes(owner: object) -> Iterator[None]:
    """Raise ConfigError for a buffer that is resized, which the worker's memory cannot be."""
    try:
        yield
    except RuntimeError as error:
        if "resize storage" not in str(error):
            raise
        raise ConfigError(
            f"a step of {owner!r} resizes a buffer ({described(error)}); {SAME_SHAPE}"
        ) from error


def load_state_dict(
    module: Any, weights: str | Path | Mapping[str, NDArray[Any]], *, average: bool = False
) -> None:
    """Load trained weights into a module: those of a logdir, or the result of `zmqtrain.load`.

    ``average``: the moving averages of a logdir.

    Raises:
        ConfigError: names or shapes are not those of the module.
        CheckpointError: the logdir has no checkpoint.
    """
    values = weights_of(weights, average=average)
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in values.items()}
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared = first.setdefault(id(parameter), name)  # a checkpoint has tied ones once
        if shared in tensors:
            tensors.setdefault(name, tensors[shared])
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"the weights do not fit the module: {error}") from None
