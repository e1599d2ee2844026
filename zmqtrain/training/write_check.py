"""Finds models that write to parameters which a step may only read."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import is_writable, read_only
from zmqtrain.models.checks import FROZEN_CHECKS, CheckSchedule, written_in_a_step


class WriteCheck:
    """Checks that steps leave the parameters as they are, in some of the steps.

    There the model reads a private copy: a write to another process's memory would kill this one.
    """

    def __init__(
        self,
        model: object,
        variables: Mapping[str, Any],
        frozen: Mapping[str, Any],
        tables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """``variables``: without frozen ones; the model may write to writable arrays.
        ``tables``: readers of tables, whose rows are copies."""
        self._model, self._variables, self._frozen = model, variables, frozen
        self._parameters = MappingProxyType({**variables, **frozen, **tables})
        self._schedule, self._frozen_checks = CheckSchedule(), FROZEN_CHECKS
        self._before: dict[str, int] = {}

    def begin(self) -> Mapping[str, Any]:
        """Begin a step; return the parameters for the model."""
        self._before = {}
        if not self._schedule.is_due():
            return self._parameters
        copies = {
            name: read_only(value.copy()) if isinstance(value, np.ndarray) else value
            for name, value in self._variables.items()
            if not is_writable(value)
        }
        watched = {**copies, **self._frozen} if self._frozen_checks else copies
        self._frozen_checks = max(0, self._frozen_checks - 1)
        self._before = {name: _digest(value) for name, value in watched.items()}
        return MappingProxyType({**self._parameters, **copies}) if copies else self._parameters

    def check(self, parameters: Mapping[str, Any]) -> None:
        """End the step that read these parameters.

        Raises:
            ConfigError: it has changed one of them.
        """
        for name, before in self._before.items():
            if _digest(parameters[name]) != before:
                raise written_in_a_step(self._model, name, is_frozen=name in self._frozen)


def _digest(array: Any) -> int:
    on_host = array if isinstance(array, np.ndarray) else array.get()
    return zlib.crc32(np.ascontiguousarray(on_host).reshape(-1).view(np.uint8).data)
