"""Checks that a module keeps its parameters and buffers, each in memory of its own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from zmqtrain.errors import ConfigError
from zmqtrain.units import shortened

_values = operator.methodcaller("values")


class Structure:
    """The parameters and buffers of a module when training begins."""

    def __init__(self, module: Any, owner: object) -> None:
        """``owner``: the model, for texts."""
        self._module, self._owner = module, owner
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._buffers = {name for name, _ in buffers_of(module)}
        self._note()

    def check(self) -> None:
        """
        Raises:
            ConfigError: a parameter was replaced, added or removed, or a buffer was added.
        """
        if self._sizes == list(map(len, self._places)) and all(
            map(operator.is_, self._now(), self._held)
        ):
            return
        now = dict(self._module.named_parameters(remove_duplicate=False))
        names = now.keys() | self._parameters.keys()
        if changed := sorted(n for n in names if now.get(n) is not self._parameters.get(n)):
            raise ConfigError(
                f"a step of {self._owner!r}, or code before it, has replaced, added or removed "
                f"parameters: {shortened(changed)}; expected those of build(): the job's optimizer "
                "changes their values, and nothing else does"
            )
        if late := [name for name, _ in buffers_of(self._module) if name not in self._buffers]:
            raise ConfigError(
                f"{self._owner!r} has a buffer that appears later: {', '.join(late)}; expected all "
                "of them from the first step on: register it in __init__, or with persistent=False"
            )
        self._note()

    def _note(self) -> None:
        """Note the dicts in which modules keep their parts, which are fast to compare."""
        parts = list(self._module.modules())
        self._parameters_of_parts = [part._parameters for part in parts]
        others = [held for part in parts for held in (part._buffers, part._modules)]
        self._places: list[Any] = [*self._parameters_of_parts, *others]
        self._sizes = list(map(len, self._places))
        self._held = list(self._now())

    def _now(self) -> Any:
        return chain.from_iterable(map(_values, self._parameters_of_parts))


def check_shapes_known(module: Any, owner: object) -> None:
    """
    Raises:
        ConfigError: a lazy layer has not seen a batch.
    """
    if lazy := [n for n, p in module.named_parameters() if is_lazy(p)]:
        raise ConfigError(
            f"build() of {owner!r} returned a module with lazy layers, whose parameters have no "
            f"shape: {shortened(lazy)}; expected one with shapes: call it in build() with a batch "
            "of zeros, or give the layers their numbers of inputs"
        )


def check_apart(module: Any, owner: object) -> None:
    """Check that each parameter and buffer has memory of its own.

    Raises:
        ConfigError: two share memory; in the worker's memory they would not.
    """
    by_storage: dict[int, list[tuple[str, Any]]] = {}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.numel() and tensor.layout is torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage().data_ptr()
            by_storage.setdefault(storage, []).append((name, tensor.detach()))
    for group in by_storage.values():
        names, tensors = zip(*group, strict=True)
        if (both := _overlapping(tensors)) is not None:
            raise ConfigError(
                f"{names[both[0]]!r} and {names[both[1]]!r} of {owner!r} share memory, so that an "
                "update of one changes the other; expected memory for each: to tie weights, use "
                "one Parameter in both places, or compute one from the other in forward; else "
                "clone() it in build()"
            )


def _overlapping(tensors: Sequence[Any]) -> tuple[int, int] | None:
    """Return the places of two tensors of one storage that share bytes, if any do."""
    ends = sorted(_bounds(tensor) for tensor in tensors)
    if all(end <= start for (_, end), (start, _) in pairwise(ends)):
        return None
    owners = torch.full((tensors[0].untyped_storage().nbytes(),), -1, dtype=torch.int16)
    for place, tensor in enumerate(tensors):
        size, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
        strides = [stride * size for stride in tensor.stride()]
        cells = owners.as_strided([*tensor.shape, size], [*strides, 1], start)
        if (found := int(cells.max())) >= 0:
            return found, place
        cells.fill_(place)
    return None


def _bounds(tensor: Any) -> tuple[int, int]:
    """Return where the elements of a tensor begin and end in its storage, in bytes."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


def buffers_of(module: Any) -> list[tuple[str, Any]]:
    """Return the buffers that the module's ``state_dict`` has, by name."""
    names = module.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in names]
