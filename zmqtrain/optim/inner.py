"""Optimizers of frameworks that train a worker's own parameters in local steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from zmqtrain.errors import ConfigError
from zmqtrain.optim.formula import FormulaRule, Numbers


class Inner(Protocol):
    """An optimizer over the memory of one worker: parameters and gradients by name, float32.

    ``kind``: the classes of the optimizer, whose state another one cannot take over.
    """

    kind: str

    def go_on(self, step: int, learning_rate: float | None) -> None:
        """Continue schedules at this step of the job, with a rate that a callback may have set.

        Raises:
            ConfigError: the optimizer has no learning rate that can be set.
        """

    def update(self, absent: Collection[str]) -> None:
        """Make one step in place; variables in ``absent`` have no gradient."""

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return copies of the moments and other state, without that of schedules."""

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over the :meth:`state` of an optimizer of this kind.

        Raises:
            ValueError, LookupError, RuntimeError: it does not fit.
        """


@dataclass(frozen=True, slots=True)
class InnerOnly(FormulaRule):
    """The optimizer of a job that has an inner one alone; it makes no updates."""

    def hyperparameters(self, step: int) -> Numbers:
        raise ConfigError("the job has only an inner optimizer, which trains in local steps")

    @staticmethod
    def formula(w: Any, g: Any) -> tuple[Any, ...]:
        return (w,)
