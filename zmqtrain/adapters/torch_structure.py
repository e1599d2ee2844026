"""Which parameters and buffers a module has, and whether it still has them after a step."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.units import shortened


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
                f"a step of {self._owner!r} has replaced, added or removed parameters: "
                f"{shortened(changed)}; expected those of build(): the job's optimizer changes "
                "their values, and nothing else does"
            )
        if late := [name for name, _ in buffers_of(self._module) if name not in self._buffers]:
            raise ConfigError(
                f"{self._owner!r} has a buffer that appears later: {', '.join(late)}; expected all "
                "of them from the first step on: register it in __init__, or with persistent=False"
            )
        self._note()

    def _note(self) -> None:
        """Note what can be compared fast: the dicts in which modules keep what they have."""
        parts = list(self._module.modules())
        self._parameters_of_parts = [part._parameters for part in parts]
        others = [held for part in parts for held in (part._buffers, part._modules)]
        self._places: list[Any] = [*self._parameters_of_parts, *others]
        self._sizes = list(map(len, self._places))
        self._held = list(self._now())

    def _now(self) -> Any:
        return chain.from_iterable(map(dict.values, self._parameters_of_parts))


def buffers_of(module: Any) -> list[tuple[str, Any]]:
    """Return the buffers that the module's ``state_dict`` has, by name."""
    names = module.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in names]
