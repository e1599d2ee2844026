"""A module of PyTorch: built with the values of a seed, then kept in the worker's memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from zmqtrain.adapters.torch_arrays import tensor_over
from zmqtrain.adapters.torch_memory import SAME_SHAPE, BoundVariables
from zmqtrain.adapters.torch_structure import Structure, buffers_of, check_apart, check_shapes_known
from zmqtrain.adapters.torch_tables_of import ModuleTables, WithoutValues, weights_in, with_tables
from zmqtrain.compute.generators import generators_kept
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Gradients, Parameters
from zmqtrain.units import shortened
from zmqtrain.user_code import described, is_of, user_code

log = logging.getLogger(__name__)

_BUILT: WeakSet[Any] = WeakSet()  # modules that instances train


class BuiltModule:
    """The module of one model, and its variables in memory."""

    def __init__(
        self,
        build: Callable[[], Any],
        compile: bool | Mapping[str, Any],
        owner: object,
        on_built: Callable[[Any], None],
        patterns: Sequence[Any] = (),
    ) -> None:
        """``owner``: the model, for texts. ``on_built``: called with the module that is kept.
        ``patterns``: names of parameters that are tables."""
        self._build, self._compile, self._owner = build, compile, owner
        self._on_built, self._patterns = on_built, patterns
        self._module: Any = None
        self._seed: int | None = None  # while the module has its initial values
        self._structure: Structure | None = None
        self._is_rest_checked = False
        self.bound = BoundVariables(owner)
        self.is_double, self.device = False, torch.device("cpu")
        self.tables = ModuleTables({})

    @property
    def module(self) -> Any:
        return self._module if self._module is not None else self.initial(0)

    def initial(self, seed: int) -> Any:
        """Return a module with the initial values of a seed; the first one is kept for steps.

        Raises:
            ConfigError: ``build`` returns no module, or variables share memory.
        """
        if self._seed == seed:
            return self._module
        with generators_kept():
            torch.manual_seed(seed)
            with user_code("build()", self._owner), WithoutValues():
                module = self._build()
        if not isinstance(module, torch.nn.Module) or is_of(module, "keras"):
            raise ConfigError(
                f"build of {self._owner!r} returned {module!r:.80}; expected a torch.nn.Module, or "
                "for a model of Keras KerasModel(build)"
            )
        check_shapes_known(module, self._owner)
        with_tables(module, self._patterns, self._owner)
        if self._module is None:
            if module in _BUILT:  # build returns one that another instance trains
                module = copy.deepcopy(module)
            _BUILT.add(module)
            check_apart(module, self._owner)
            self._on_built(module)
            self._module, self._seed = module, seed
            self._train(module)
            self._structure = Structure(module, self._owner)
            self.tables = ModuleTables(weights_in(module), module)
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
                self._owner,
                shortened(resting),
            )

    def bind(self, parameters: Parameters, out: Gradients | None) -> None:
        """Make the module's parameters and buffers those of this memory; load the buffers.

        Without ``out`` for an evaluation.
        """
        if self.bound.rebind(parameters, out):
            module, self._seed = self.module, None
            self.tables.insert()
            self.check()
            arrays = (
                value for name, value in parameters.items() if name not in self.tables.weights
            )
            first = tensor_over(next(arrays, np.zeros(0, np.float32)))
            self.is_double = first.dtype == torch.float64  # in `zmqtrain check`
            self.device = first.device
            module.to(first.device)
            self.tables.bind(parameters, out, first.device, first.dtype)
            for name, parameter in module.named_parameters():
                if name in parameters:
                    self.bound.add_parameter(name, parameter)
            for name, _ in buffers_of(module):
                if name in parameters:
                    path, _, attribute = name.rpartition(".")
                    self.bound.add_state(name, module.get_submodule(path), attribute)
        self.bound.load()

    def check(self) -> None:
        """
        Raises:
            ConfigError: the module has other parameters or buffers than when it was built.
        """
        assert self._structure is not None
        self._structure.check()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Set the module to eval mode for the block.

        Raises:
            ConfigError: its own ``eval()`` changes parameters.
        """
        modes = [(module, module.training) for module in self._module.modules()]
        self._rest([module for module, _ in modes])
        try:
            yield
        finally:
            self._module.train()
            for module, is_training in modes:
                module.training = is_training

    def _rest(self, modules: Sequence[Any]) -> None:
        """Call ``eval()``; the first time, check one of the module's own."""
        usual = torch.nn.Module.train, torch.nn.Module.eval
        is_own = any((type(module).train, type(module).eval) != usual for module in modules)
        before = self.bound.digests() if is_own and not self._is_rest_checked else []
        self._module.eval()
        if before and self.bound.digests() != before:
            self._module.train()  # which takes the change back
            raise ConfigError(
                f"eval() of {self._owner!r} changes parameters, which other tasks use too; "
                "expected a module that only reads them, such as LoRA layers with "
                "merge_weights=False"
            )
        self._is_rest_checked = True

    @contextmanager
    def keeping_shapes(self) -> Iterator[None]:
        """Raise ConfigError for a buffer that is resized, which the worker's memory cannot be."""
        try:
            yield
        except RuntimeError as error:
            if "resize storage" not in str(error):
                raise
            raise ConfigError(
                f"a step of {self._owner!r} resizes a buffer ({described(error)}); {SAME_SHAPE}"
            ) from error
