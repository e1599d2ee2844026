"""Tensors of torch over the worker's memory, for the adapters of torch and of Keras on it."""

from __future__ import annotations

import logging
import operator
import sys
import zlib
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zmqtrain.adapters.torch_arrays import array_of, has_numpy, variable_over
from zmqtrain.compute.arrays import is_writable
from zmqtrain.compute.threads import thread_limit
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Buffers, Gradients, Parameters, absent, written
from zmqtrain.models.checks import FROZEN_CHECKS, written_in_a_step
from zmqtrain.units import shortened

log = logging.getLogger(__name__)

SAME_SHAPE = (
    "expected buffers that keep their shapes: give them the right ones in __init__, call the "
    "module on a batch in build(), or register them with persistent=False"
)


def use_own_threads() -> None:
    """Limit torch to the threads of this task; OpenMP has a limit for each calling thread."""
    threads = thread_limit()
    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def seed_torch(seed: int, batch: int) -> None:
    """Seed torch's own generators for a batch.

    torch.manual_seed() notes a traceback for each kind of accelerator that is not used, which takes
    longer than a small step.
    """
    number = zlib.crc32(f"{seed} {batch}".encode())
    torch.default_generator.manual_seed(number)
    if "cupy" in sys.modules or torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


class BoundVariables:
    """Variables of a model in the worker's memory: parameters, their gradients, and state.

    ``backward()`` adds the gradients up there.
    """

    def __init__(self, owner: object) -> None:
        """``owner``: the model, for texts."""
        self._owner = owner
        self._values: Parameters = {}
        self._out: Gradients | None = None  # None in an evaluation
        self._arrays: list[Any] = []  # of both
        self._trained: list[tuple[str, Any, Any]] = []  # (name, parameter, view of its gradient)
        self._state: list[_State] = []
        self._hooks: list[Any] = []
        self._unused: set[str] = set()  # that have been reported
        self.is_last_part = True  # whether backward() completes the gradients
        # In bfloat16: tensor, values, and of those that are trained a copy as loaded.
        self._low_precision: list[tuple[_Parameter, Any, Any, Any | None]] = []
        self._frozen: list[tuple[_Parameter, Any, Any]] = []  # the same, in the first steps
        self._frozen_checks = 0  # how many of these steps are left
        self._parameters: list[_Parameter] = []
        self._tensors: list[Any] = []  # of them
        self._marks: list[Any] = []  # of the parameters, as they were left
        self._cleared: list[tuple[int, int]] = []  # marks of the gradients
        self._is_in_step = False
        self._is_in_place = True  # whether a gradient stays as backward() has made it
        self._optimizer = ""  # of the user's own, which has changed the parameters
        _BOUND.add(self)

    def rebind(self, values: Parameters, out: Gradients | None) -> bool:
        """Release all variables, which must be added again; return False if they lie in this
        memory already."""
        use_own_threads()
        arrays = [*values.values(), *(out or {}).values()]
        is_same = len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays))
        if is_same and out is self._out:
            return False
        for hook in self._hooks:
            hook.remove()
        for _, parameter, _ in self._trained:
            parameter.grad = None
        self._values, self._out, self._arrays = values, out, arrays
        self._trained, self._state, self._hooks = [], [], []
        self._parameters, self._tensors, self._marks = [], [], []
        self._low_precision, self._frozen, self._frozen_checks = [], [], FROZEN_CHECKS
        return True

    def add_parameter(self, name: str, parameter: Any) -> None:
        """Keep a parameter in the memory, and its gradient if it is trained."""
        memory = values = variable_over(self._values[name], parameter)
        if is_low_precision := not has_numpy(parameter.dtype) and values.dtype == torch.float32:
            memory = values.to(parameter.dtype)
        parameter.data = memory
        is_trained = self._out is not None and name in self._out
        is_own = is_trained and is_writable(self._values[name])
        one = _Parameter(name, parameter, memory, is_own, is_trained)
        if is_low_precision and parameter.requires_grad:
            loaded = memory.clone() if is_trained else None
            self._low_precision.append((one, memory, values, loaded))
        elif is_low_precision and self._out is not None:
            self._frozen.append((one, memory, values))
        self._parameters.append(one)
        self._tensors.append(parameter)
        if self._out is None or name not in self._out:
            return
        view = variable_over(self._out[name], parameter)
        if is_low_precision:
            parameter.grad_dtype = view.dtype
        self._trained.append((name, parameter, view))
        if isinstance(self._out, Buffers) and self._out.on_written is not None:

            def on_accumulated(parameter: Any) -> None:
                if self.is_last_part and self._is_in_place and self._out is not None:
                    if parameter.grad is not view:
                        self._take_in(name, parameter, view)
                    written(self._out, name)

            self._hooks.append(parameter.register_post_accumulate_grad_hook(on_accumulated))

    def add_state(self, name: str, owner: Any, attribute: str) -> None:
        """Keep a tensor in the memory; a step may write to it, or replace it in its owner."""
        tensor = getattr(owner, attribute)
        result = None if self._out is None else variable_over(self._out[name], tensor)
        source = variable_over(self._values[name], tensor)
        self._state.append(_State(owner, attribute, source, result))

    def load(self) -> None:
        """Give state and parameters in bfloat16 their current values."""
        for state in self._state:
            state.load()
        self.load_low_precision()

    def load_low_precision(self) -> None:
        """Give parameters in bfloat16 their current values; keep writes to them."""
        self._keep_writes()
        for _, memory, values, loaded in self._low_precision:
            memory.data.copy_(values)  # not a change that a step makes
            if loaded is not None:
                loaded.copy_(memory)

    def _keep_writes(self) -> None:
        """Keep what was written to parameters in bfloat16; a write to .data leaves no mark.

        The optimizer may have changed the values since they were loaded.

        Raises:
            ConfigError: other tasks have the values, too.
        """
        for one, memory, values, loaded in self._low_precision:
            if loaded is not None and not torch.equal(_bits(memory), _bits(loaded)):
                one.check_own(self._owner, "writes to")
                values.copy_(torch.where(memory == loaded, values, memory))
                loaded.copy_(memory)

    def clear(self, *, in_place: bool = True) -> None:
        """Begin a step: make all gradients 0.

        ``in_place``: nothing but backward() writes to them. Else they are None, as in torch: a
        loop that scales all of them must not find those that the step does not use.

        Raises:
            ConfigError: an optimizer of the user's own has made a step since the last one.
        """
        self._check_optimizer()
        self._is_in_step, self._is_in_place = True, in_place
        if self._trained:
            torch._foreach_zero_([view for _, _, view in self._trained])
        self._cleared = self._gradient_marks()
        for _, parameter, _ in () if in_place else self._trained:
            parameter.grad = None
        if not self._marks:
            self._marks = self._marked()

    def note_optimizer(self, optimizer: Any, parameters: set[int]) -> None:
        """Note that an optimizer is about to make a step on tensors with these ids.

        Raises:
            ConfigError: parameters of this model, which is in a step, are among them.
        """
        if any(id(one.parameter) in parameters for one in self._parameters):
            self._optimizer = type(optimizer).__name__
            if self._is_in_step:
                self._check_optimizer()

    def _check_optimizer(self) -> None:
        found, self._optimizer = self._optimizer, ""
        if found:
            raise ConfigError(
                f"torch.optim.{found} makes a step on parameters of {self._owner!r}, which the "
                "job's optimizer trains; expected one optimizer: leave out optimizer.step()"
            )

    def rest(self) -> None:
        """Make gradients of 0 those of a step of which nothing counts."""
        for _, parameter, view in self._trained:
            parameter.grad = view.zero_()

    def complete(self, *, has_others: bool = False) -> None:
        """Copy gradients and state that a step has left elsewhere into the memory.

        ``has_others``: there are gradients of other variables.

        Raises:
            ConfigError: a gradient is sparse, no parameter has one, or the step has changed a
                parameter that it may only read.
        """
        self._is_in_step = False
        if self._marked() != self._marks:
            for one in self._parameters:
                one.take_in(self._owner)
            self._marks = self._marked()
        self._keep_writes()
        self._check_frozen()
        marks = self._gradient_marks()
        none = self._without_gradient(marks)
        if self._trained and len(none) == len(self._trained) and not has_others:
            raise ConfigError(
                f"no parameter of {self._owner!r} has a gradient; a loop of your own calls "
                "loss.backward() before session.step(loss)"
            )
        if any(a[0] != b[0] for a, b in zip(marks, self._cleared, strict=True)):
            self._return_gradients()
        for name, parameter, view in self._trained:
            if parameter.grad is not view:
                self._take_in(name, parameter, view)
        absent(self._out or {}, *none)
        for state in self._state:
            state.store()

    def _check_frozen(self) -> None:
        """Compare frozen parameters in bfloat16 with their values, in the first steps.

        Raises:
            ConfigError: one was written to.
        """
        if self._frozen_checks:
            self._frozen_checks -= 1
            for one, memory, values in self._frozen:
                if not torch.equal(_bits(memory), _bits(values.to(memory.dtype))):
                    one.check_own(self._owner, "writes to")

    def digests(self) -> list[int]:
        """Return a digest of each parameter."""
        arrays = (np.ascontiguousarray(array_of(one)) for one in self._tensors)
        return [zlib.crc32(array.reshape(-1).view(np.uint8).data) for array in arrays]

    def _marked(self) -> list[Any]:
        """Return marks that differ after any change to a parameter, except through ``.data``."""
        every = self._tensors
        marks = [each.data_ptr() for each in every]
        marks += [each._version for each in every]
        return marks + [each.requires_grad for each in every]

    def _gradient_marks(self) -> list[tuple[int, int]]:
        """Return marks that differ after a write to a gradient, or to its ``.data``."""
        return [(view.data_ptr(), view._version) for _, _, view in self._trained]

    def _without_gradient(self, marks: list[tuple[int, int]]) -> list[str]:
        """Return the names of the parameters of which the step has written no gradient."""
        each = zip(self._trained, marks, self._cleared, strict=True)
        none = [
            name
            for (name, parameter, view), mark, before in each
            if parameter.grad is None or (parameter.grad is view and mark == before)
        ]
        text = "parameters of %r without a gradient, left alone unless another worker has one: %s"
        if new := [name for name in none if name not in self._unused]:
            log.warning(text, self._owner, shortened(new))
        self._unused.update(none)
        return none

    def _return_gradients(self) -> None:
        """Copy gradients whose ``.data`` was replaced into the worker's memory."""
        assert self._out is not None
        for name, _, view in self._trained:
            memory = variable_over(self._out[name], view)
            memory.copy_(view)
            view.data = memory

    def _take_in(self, name: str, parameter: Any, view: Any) -> None:
        """Copy a gradient into the worker's memory, where the next one is made."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            view.zero_()
        elif gradient.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of {name!r} of {self._owner!r} is sparse; expected a dense one: "
                "look rows up with sparse=False, or name it in the job's tables"
            )
        else:
            view.copy_(gradient)
        parameter.grad = view


class _Parameter:
    """One parameter, and the memory that it lies in."""

    def __init__(
        self, name: str, parameter: Any, memory: Any, is_own: bool, is_trained: bool
    ) -> None:
        """``is_own``: no other task has the values, so writes of a step count."""
        self.parameter = parameter
        self._name, self._memory = name, memory
        self._is_own, self._is_trained = is_own, is_trained
        self._version = parameter._version

    def take_in(self, owner: object) -> None:
        """Keep a change that a step made to the parameter.

        Raises:
            ConfigError: that cannot count.
        """
        name, parameter, memory = self._name, self.parameter, self._memory
        if parameter.requires_grad != self._is_trained:
            raise ConfigError(
                f"the parameter {name!r} of {owner!r} has requires_grad={parameter.requires_grad} "
                f"now, and had {self._is_trained} at the start; expected no change: begin another "
                "job that has build() freeze other parameters, with initial=the weights of this one"
            )
        if parameter.dtype != memory.dtype or parameter.shape != memory.shape:
            raise ConfigError(
                f"a step of {owner!r} makes {parameter.dtype} {list(parameter.shape)} of the "
                f"parameter {name!r}; expected {memory.dtype} {list(memory.shape)}: set dtype and "
                "shape in build()"
            )
        how = "writes to"
        if parameter.data_ptr() != memory.data_ptr():
            how = "replaces the data of"
            is_written = not torch.equal(parameter.data, memory)
        else:
            is_written = parameter._version != self._version
        if is_written:
            self.check_own(owner, how)
        if parameter.data_ptr() != memory.data_ptr():
            if is_written:
                memory.copy_(parameter.data)
            parameter.data = memory
        self._version = parameter._version

    def check_own(self, owner: object, how: str) -> None:
        """
        Raises:
            ConfigError: the step has changed a parameter (``how``), and others have it, too.
        """
        if not self._is_own:
            raise written_in_a_step(owner, self._name, is_frozen=not self._is_trained, how=how)


def _bits(tensor: Any) -> Any:
    return tensor.reshape(-1).view(torch.uint8)


class _State:
    """One tensor of the state."""

    def __init__(self, owner: Any, attribute: str, source: Any, result: Any) -> None:
        """``source``: its value before a step. ``result``: where its new value goes, if at all."""
        self._owner, self._attribute = owner, attribute
        self._source, self._result = source, result
        self._tensor = getattr(owner, attribute)
        is_there = result is not None and result.dtype == self._tensor.dtype
        self._tensor.data = result if is_there else self._tensor.clone()

    def load(self) -> None:
        self._tensor.copy_(self._source)

    def store(self) -> None:
        current = getattr(self._owner, self._attribute)
        if current.shape != self._result.shape:
            raise ConfigError(
                f"a step gives {self._attribute!r} of a {type(self._owner).__name__} the shape "
                f"{list(current.shape)}, and it had {list(self._result.shape)}; {SAME_SHAPE}"
            )
        if current.data_ptr() != self._result.data_ptr():  # replaced, or of another dtype
            self._result.copy_(current)
        if current is not self._tensor:
            setattr(self._owner, self._attribute, self._tensor)


_BOUND: WeakSet[BoundVariables] = WeakSet()


def _note_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for bound in tuple(_BOUND):
        bound.note_optimizer(optimizer, parameters)


register_optimizer_step_pre_hook(_note_optimizer)
