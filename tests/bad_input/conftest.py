"""Jobs to spoil, and the harness of the whole-run tests for what needs real processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zmqtrain import Job
from zmqtrain.data import NoisyLine
from zmqtrain.models import LinearRegression
from zmqtrain.models.base import Batch, Gradients, Parameters
from zmqtrain.optim import SGD

HARNESS = Path(__file__).parents[1] / "integration" / "conftest.py"

_spec = importlib.util.spec_from_file_location("integration_harness", HARNESS)
assert _spec is not None and _spec.loader is not None
harness = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = harness
_spec.loader.exec_module(harness)

stage = harness.stage


class Line:
    """A sound model, written as a user would: a class with three methods and nothing else."""

    def __init__(self) -> None:
        self.inner = LinearRegression()

    def parameters(self, seed: int) -> dict[str, Any]:
        return self.inner.parameters(seed)

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        return self.inner.loss_and_gradients(parameters, batch, out)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return self.inner.metrics(parameters, batch)


@dataclass(frozen=True)
class Spoilt:
    """A sound model but for one method, which is given as a function of what the method returns
    and of its arguments."""

    method: str
    spoil: Callable[..., Any]

    def parameters(self, seed: int) -> Any:
        return self._call("parameters", seed)

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> Any:
        return self._call("loss_and_gradients", parameters, batch, out)

    def metrics(self, parameters: Parameters, batch: Batch) -> Any:
        return self._call("metrics", parameters, batch)

    def _call(self, method: str, *arguments: Any) -> Any:
        sound = getattr(LinearRegression(), method)(*arguments)
        return self.spoil(sound, *arguments) if method == self.method else sound

    def __repr__(self) -> str:
        return "Spoilt()"


@pytest.fixture(scope="session")
def spoilt() -> type[Spoilt]:
    return Spoilt


@pytest.fixture(scope="session")
def make_job() -> Callable[..., Job]:
    """Make a job of a few hundred quick steps, some fields of which are wrong."""

    def make(**fields: Any) -> Job:
        sound = {"model": Line(), "data": NoisyLine(), "optimizer": SGD(0.1), "batch_size": 20}
        return Job(**sound | {"steps": 200} | fields)

    return make


@pytest.fixture(scope="session")
def make_stage() -> Callable[[Path], Any]:
    """Make a directory to start processes in, for tests that share them."""
    return harness.Stage
