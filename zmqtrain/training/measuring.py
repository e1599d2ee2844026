"""Measures of steps besides the loss: as in Keras, those of each batch before its update.

A model reports them in its ``loss_and_gradients``; see :func:`zmqtrain.models.base.measured`. They
travel with the gradient, as named sums over the batch's examples, and count if it is applied. So
they have little room: a metric with many sums, such as AUC, measures validation data alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import count, takewhile

import numpy as np

from zmqtrain.metrics import Measures, Metric
from zmqtrain.metrics.sums import added, check_sums, sums_of
from zmqtrain.models.backend import on_host
from zmqtrain.models.base import Outputs
from zmqtrain.models.trees import mapped
from zmqtrain.models.weights import weighted
from zmqtrain.store.segment_layout import NAMES_NBYTES, SUMS, has_room
from zmqtrain.user_code import user_code

log = logging.getLogger(__name__)


class StepSums:
    """Adds up the measures that a model reports of one batch, perhaps in parts."""

    def __init__(
        self, metrics: Sequence[Metric], model: object = None, *, is_weighted: bool = False
    ) -> None:
        """``is_weighted``: the job's ``class_weight`` has put weights behind the labels."""
        self._metrics, self._model, self._is_weighted = list(metrics), model, is_weighted
        self._left_out: set[str] = set()
        self._examples, self._parts = 0.0, 0
        self._is_checked = False  # that the metrics return sums
        self.sums: dict[str, float] = {}

    def begin(self, examples: float) -> None:
        """Begin a step; ``examples``: the number of its examples, or the weight of its batch."""
        self._examples, self._parts, self.sums = examples, 0, {}

    def add(
        self,
        examples: float | None,
        means: Mapping[str, float],
        outputs: Callable[[], Outputs | None] | None = None,
    ) -> None:
        """Add some examples of the batch, as :func:`zmqtrain.models.base.measured` reports them.

        Raises:
            ConfigError: a metric raises.
        """
        examples, found = self._examples if examples is None else examples, dict[str, float]()
        for name, mean in means.items():
            if name != "loss":
                self._keep(name, {name: weighted(float(mean), examples)}, found)
        given = _on_host(outputs() if outputs is not None and self._metrics else None)
        for metric in tuple(self._metrics):
            if given is None:
                break
            if not self._is_checked:
                check_sums(metric, *given, self._model, self._is_weighted)
            sums = np.asarray(sums_of(metric, *given, self._model, self._is_weighted), np.float64)
            numbered = {_name(metric, i): value for i, value in enumerate(sums.tolist())}
            if sums.ndim != 1 or not self._keep(metric.name, numbered, found):
                self._metrics.remove(metric)
        self._is_checked = True
        self.sums = added(self.sums, found) if self._parts else found
        self._parts += 1

    def _keep(self, name: str, sums: dict[str, float], found: dict[str, float]) -> bool:
        """Add the sums of one measure; return False if there is no room for them."""
        if has_room(found.keys() | sums.keys()):
            found.update(sums)
            return True
        if name not in self._left_out:
            self._left_out.add(name)
            log.info(
                "%r is not measured in training: a step has room for %d sums, with printable names "
                "of %d bytes in all", name, SUMS, NAMES_NBYTES)  # fmt: skip
        return False


def measures_of(metrics: Sequence[Metric], sums: Mapping[str, float], weight: float) -> Measures:
    """Return the measures of batches with these sums, and with this sum of weights.

    Raises:
        ConfigError: a metric raises.
    """
    rest, results = dict(sums), {}
    for metric in metrics:
        names = list(takewhile(rest.__contains__, (_name(metric, i) for i in count())))
        if own := [rest.pop(name) for name in names]:
            with user_code("result()", metric):
                results[metric.name] = metric.result(np.array(own))
    return {name: value / weight for name, value in rest.items()} | results


def _on_host(given: Outputs | None) -> Outputs | None:
    if given is None:
        return None
    outputs, batch = given
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    arrays = tuple(map(on_host, several))
    return arrays if several is outputs else arrays[0], mapped(on_host, batch)


def _name(metric: Metric, place: int) -> str:
    return f"{metric.name}[{place}]"
