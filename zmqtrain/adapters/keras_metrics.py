"""Compiled metrics of a Keras model, as metrics of zmqtrain."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import keras
import numpy as np
from keras.src.backend import set_keras_mask
from keras.src.trainers.compile_utils import get_metric
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Batch

_MEASURING = threading.Lock()  # workers of one process share the variables of metrics


class CompiledMeasure(NamedTuple):
    """A compiled metric.

    ``name``: in Keras's logs. ``metric``: None for an accuracy whose kind depends on the data.
    ``output``: number of the measured output. ``is_weighted``: by weights of the examples, if any.
    """

    name: str
    given: Any
    metric: Any
    output: int
    is_weighted: bool

    @property
    def direction(self) -> str | None:
        """The better direction, "up" or "down"; None: Keras does not know it."""
        return "up" if self.metric is None else getattr(self.metric, "_direction", None)


def measures_of(compiled: Any, outputs: Sequence[str]) -> list[CompiledMeasure]:
    """Return all compiled metrics."""
    found: dict[str, CompiledMeasure] = {}
    for is_weighted in (False, True):
        given = getattr(compiled, f"_user_{'weighted_' * is_weighted}metrics", None) or []
        if len(outputs) == 1:
            given = [given]
        every = [given.get(name) for name in outputs] if isinstance(given, dict) else given
        for number, of_output in enumerate(every):
            prefix = f"{outputs[number]}_" if len(outputs) > 1 else ""
            for one in filter(None, keras.tree.flatten(of_output)):
                is_open = isinstance(one, str) and one.lower() in ("accuracy", "acc")
                metric = None if is_open else get_metric(one, None, None)
                name = _unused(found, prefix, one if metric is None else metric.name, is_weighted)
                found[name] = CompiledMeasure(name, one, metric, number, is_weighted)
    return list(found.values())


def _unused(names: Iterable[str], prefix: str, name: str, is_weighted: bool) -> str:
    """Return the name of a metric in Keras's logs, where no two are alike."""
    if is_weighted and prefix + name in names:
        name = f"weighted_{name}"
    numbered = (f"{prefix}{name}_{number}" for number in count(1))
    return next(full for full in chain([prefix + name], numbered) if full not in names)


def is_mean(metric: Any) -> bool:
    """Return whether a metric is known to be the mean of a number for each example."""
    return metric is None or (
        _is_of_keras(metric) and type(metric).result is keras.metrics.Mean.result
    )


def _is_of_keras(metric: Any) -> bool:
    return type(metric).__module__.partition(".")[0] == "keras"


class SummedMetric:
    """A metric of Keras as one of zmqtrain: its variables are sums over examples."""

    takes_whole_batch = True  # it knows which arrays are targets and weights

    def __init__(self, measure: CompiledMeasure, network: Any) -> None:
        self.name, self._output = measure.name, measure.output
        self.metric = measure.metric  # None until it has seen data
        self._adds_up = self.metric is None or _is_of_keras(self.metric)
        self._given, self._target = measure.given, len(network.inputs) + measure.output
        behind = len(network.inputs) + len(network.outputs)
        self._weights = slice(behind, behind + measure.is_weighted)
        outputs = keras.tree.flatten(network.outputs_like)
        self._shape = getattr(outputs[measure.output], "shape", ())
        self._mask_axes = next(iter(network.mask_axes[measure.output :]), None)

    def __repr__(self) -> str:
        kind = self._given if self.metric is None else f"metrics.{type(self.metric).__name__}"
        return f"keras.{kind}(name={self.name!r})"

    def update(self, outputs: Any, batch: Batch) -> NDArray[np.float64]:
        found = outputs[self._output] if isinstance(outputs, tuple) else outputs
        labels = batch[self._target]
        with _MEASURING:
            if self.metric is None:
                self.metric = get_metric(self._given, labels, found)
            self.metric.reset_state()
            sums = self._updated(labels, found, batch)
            if not self._adds_up:
                self._check_twice(sums, self._updated(labels, found, batch))
            return sums

    def _updated(self, labels: Any, found: Any, batch: Batch) -> NDArray[np.float64]:
        """Update the metric; return its variables as one array."""
        weights = map(np.array, batch[self._weights])  # Keras may multiply masks into them
        self.metric.update_state(labels, self._tensor(found), *weights)
        return np.concatenate([np.ravel(array_of(v)) for v in self.metric.variables], dtype=float)

    def _check_twice(self, once: NDArray[np.float64], twice: NDArray[np.float64]) -> None:
        """
        Raises:
            ConfigError: the variables of a metric of the user's own are not sums.
        """
        if not np.allclose(twice, 2 * once, rtol=1e-3, equal_nan=True):
            raise ConfigError(
                f"{self!r} has the variables {once.tolist()} after a batch, and {twice.tolist()} "
                "if that batch comes again; expected sums, which double, since parts of the data "
                "are measured apart and added: add to the variables in update_state(), and divide "
                "them in result()"
            )
        self._adds_up = bool(once.any())

    def _tensor(self, outputs: NDArray[Any]) -> Any:
        """Return outputs as Keras takes them, with their mask."""
        if not isinstance(outputs, np.ma.MaskedArray) or self._mask_axes is None:
            return outputs
        counts = ~np.ma.getmaskarray(outputs)
        tensor = keras.ops.convert_to_tensor(outputs.data)
        mask = counts.reshape(*counts.shape[: self._mask_axes], -1)[..., 0]
        set_keras_mask(tensor, keras.ops.convert_to_tensor(mask))
        return tensor

    def result(self, sums: NDArray[np.float64]) -> Any:
        begin = 0
        with _MEASURING:
            if self.metric is None:  # every accuracy is a mean
                return float(sums[0] / sums[1]) if sums[1] else 0.0
            held = sum(int(np.prod(variable.shape)) for variable in self.metric.variables)
            if held < len(sums):  # an update makes some, and was in another process
                zeros = np.zeros([size or 1 for size in self._shape], np.float32)
                self.metric.update_state(zeros, zeros)
            for variable in self.metric.variables:
                size = int(np.prod(variable.shape))
                variable.assign(sums[begin : begin + size].reshape(variable.shape))
                begin += size
            found = keras.ops.convert_to_numpy(self.metric.result())
        return found.astype(np.float64) if found.ndim else float(found)


def array_of(variable: Any) -> NDArray[Any]:
    """Return a copy of a variable's value."""
    return np.array(keras.ops.convert_to_numpy(variable.value))
