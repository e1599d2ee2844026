"""The variables of a model as a job begins with them: names, kinds, and initial values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import as_model
from zmqtrain.store.layout import AVERAGED, DTYPES
from zmqtrain.store.weights import by_first_name, check_names, difference
from zmqtrain.user_code import user_code


@dataclass(frozen=True)
class ModelVariables:
    """Asks a model for its variables, and checks its answers.

    ``initial``: values by name, in place of the model's own. ``is_strict``: these must be all of
    the model's variables, and no others, but tables may be left out. ``has_tables``: something is
    trained beside them.
    """

    model: Any
    seed: int
    initial: Mapping[str, Any]
    is_strict: bool
    has_tables: bool = False

    def trained(self, *, empty: bool = False) -> dict[str, Any]:
        """Return the initial values of the variables that are trained; ``empty``: any values.

        Raises:
            ConfigError: they are not named float32 NumPy arrays, not finite, or the model raises.
        """
        found = self._named("parameters", "float32 NumPy arrays", empty)
        for name, value in found.items():
            if not isinstance(value, np.ndarray) or value.dtype != np.float32:
                raise ConfigError(
                    f"parameter {name!r} of {self.model!r} is a {_kind_of(value)}; "
                    "expected a float32 NumPy array: convert it in the model's parameters()"
                )
        if not found and not self.has_tables:
            raise ConfigError(f"{self.model!r} has no parameters: there is nothing to train")
        if not empty:
            self._check_finite(found)
        return found

    def state(self, constants: Mapping[str, Any], *, empty: bool = False) -> dict[str, Any]:
        """Return the initial values of the model's state without its ``constants``, or any values.

        Raises:
            ConfigError: they are not named NumPy arrays of a supported dtype, not finite, or the
                model raises.
        """
        found = {n: v for n, v in self.arrays("state", empty).items() if n not in constants}
        if not empty:
            self._check_finite(found)
        return found

    def constants(self) -> dict[str, Any]:
        """Return the model's state that begins with NaN or infinity, such as a mask.

        Of a model that can do without its values (``empty``) nothing is known here.
        """
        is_known = as_model(self.model).empty("state") is None
        state = self.arrays("state") if is_known else {}
        return {name: value for name, value in state.items() if not _is_finite(value)}

    def arrays(self, method: str, empty: bool = False) -> dict[str, Any]:
        """Return copies of the arrays that a method of the model returns.

        Raises:
            ConfigError: they are not named NumPy arrays of a supported dtype, or the model raises.
        """
        arrays = self._named(method, "NumPy arrays", empty)
        for name, value in arrays.items():
            if not isinstance(value, np.ndarray | np.generic) or value.dtype.name not in DTYPES:
                raise ConfigError(
                    f"{name!r} in {method}() of {self.model!r} is a {_kind_of(value)}; expected a "
                    f"NumPy array of one of these dtypes: {', '.join(DTYPES)}"
                )
        return {
            name: np.array(value, value.dtype.name, order="C") for name, value in arrays.items()
        }

    def check_names(self, names: Sequence[str], tables: Sequence[str] = ()) -> None:
        """Check the names of all variables, and of tables.

        Raises:
            ConfigError: a name is there twice, or ``initial`` has other names.
        """
        check_names(names)
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError(
                f"{self.model!r} has two variables called {repeated[0]!r}; expected each name "
                "in one of parameters(), state() and frozen()"
            )
        if twice := {*names}.intersection(tables):
            raise ConfigError(
                f"{self.model!r} has a table and a variable called {min(twice)!r}; expected "
                "another name for each"
            )
        initial = by_first_name(self.initial, self.model)
        missing = [name for name in names if name not in initial]
        unexpected = [name for name in initial if name not in {*names, *tables}]
        if self.initial and self.is_strict and (missing or unexpected):
            raise ConfigError(
                f"initial does not fit {self.model!r}: missing {', '.join(missing) or 'none'}; "
                f"unexpected {', '.join(unexpected) or 'none'}; give the variables of this model, "
                "or initial_strict=False to take those that fit"
            )

    def _named(self, method: str, expected: str, empty: bool) -> dict[str, Any]:
        """Return the result of a method of the model, with the values of ``initial``."""
        with user_code(f"{method}()", self.model):
            model = as_model(self.model)
            values = model.empty(method) if empty else None
            if values is None:
                values = getattr(model, method)(self.seed)
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise ConfigError(
                f"{method}() of {self.model!r} returned {values!r:.80}; expected a dict of names "
                f"and {expected}"
            )
        initial = by_first_name(self.initial, self.model)
        given = {
            name: initial[name]
            for name, value in values.items()
            if name in initial and isinstance(value, np.ndarray | np.generic)
        }
        if text := difference(given, {name: values[name] for name in given}):
            raise ConfigError(
                f"initial has other shapes than {self.model!r}: {text}; expected the "
                "weights of this model; leave these names out, with initial_strict=False"
            )
        return values | {name: value.astype(values[name].dtype) for name, value in given.items()}

    def _check_finite(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if not _is_finite(value):
                place = "initial" if name in self.initial else repr(self.model)
                raise ConfigError(
                    f"{name!r} in {place} holds NaN or infinity, with which nothing can be "
                    "trained; expected finite numbers: a mask may hold a number such as -1e9, or "
                    "be no variable of the model"
                )


def _is_finite(value: Any) -> bool:
    return value.dtype.name not in AVERAGED or bool(np.isfinite(value).all())


def _kind_of(value: Any) -> str:
    return f"{getattr(value, 'dtype', '')} {type(value).__name__}".strip()
