"""Which parameters and buffers a module has, and whether it still has them after a step."""

from __future__ import annotations

from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.units import shortened


class Structure:
    """The parameters and buffers of a module when training begins."""

    def __init__(self, module: Any, owner: object) -> None:
        """``owner``: the model, for texts."""
        self._module, self._owner = module, owner
        self._buffers = [name for name, _ in buffers_of(module)]
        self._find()

    def check(self) -> None:
        """
        Raises:
            ConfigError: a parameter was replaced, added or removed, or a buffer was added.
        """
        owner, module = self._owner, self._module
        if self._held != self._count() or not all(
            part._parameters.get(key) is parameter for part, key, parameter in self._places
        ):
            now = dict(module.named_parameters(remove_duplicate=False))
            names = now.keys() | self._parameters.keys()
            if changed := sorted(n for n in names if now.get(n) is not self._parameters.get(n)):
                raise ConfigError(
                    f"a step of {owner!r} has replaced, added or removed parameters: "
                    f"{shortened(changed)}; expected those of build(): the job's optimizer changes "
                    "their values, and nothing else does"
                )
            self._find()
        if self._persistent != sum(map(_persistent, self._parts)):
            late = [name for name, _ in buffers_of(module) if name not in self._buffers]
            raise ConfigError(
                f"{owner!r} has a buffer that appears later: {', '.join(late)}; expected all of "
                "them from the first step on: register it in __init__, or with persistent=False"
            )

    def _find(self) -> None:
        self._parts = list(self._module.modules())
        self._parameters = dict(self._module.named_parameters(remove_duplicate=False))
        self._places = [(m, key, p) for m in self._parts for key, p in m._parameters.items()]
        self._held = self._count()
        self._persistent = sum(map(_persistent, self._parts))

    def _count(self) -> int:
        return sum(len(part._parameters) + len(part._modules) for part in self._parts)


def buffers_of(module: Any) -> list[tuple[str, Any]]:
    """Return the buffers that the module's ``state_dict`` has, by name."""
    names = module.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in names]


def _persistent(module: Any) -> int:
    """Return how many buffers of its own, without those of its parts, belong to the state."""
    return len(module._buffers) - len(module._non_persistent_buffers_set)
