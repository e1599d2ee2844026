"""Measuring a model on a whole dataset, and predicting with it.

A data set is measured in parts, whose sums are added in order. So the result has the same bits
however the parts are spread over tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zmqtrain.data.exact import concatenated
from zmqtrain.data.subset import checked
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.metrics import Measures, Metric
from zmqtrain.metrics.sums import Totals, added, check_sums
from zmqtrain.models.base import Array, Batch, Dataset, Model, Parameters, as_model
from zmqtrain.models.rows import TableReader
from zmqtrain.models.trees import copied
from zmqtrain.models.weights import weighted, weights_of
from zmqtrain.user_code import user_code

ROWS = 1024  # examples at a time, at most
PARTS = 64  # of a data set, at most


class PartSums:
    """Sums over examples: of the model's measures, and of the metrics."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.measures: dict[str, float] = {}
        self.weight = 0.0  # of the batches
        self.metrics = Totals(metrics)
        self._is_empty = True

    def add(self, other: PartSums) -> None:
        """Add the sums of another part.

        Raises:
            ConfigError: the sums of a metric have another shape there.
        """
        self.add_measures(other.measures, other.weight)
        self.metrics.merge(other.metrics.sums)

    def add_measures(self, sums: dict[str, float], weight: float) -> None:
        self.weight += weight
        self.measures = dict(sums) if self._is_empty else added(self.measures, sums)
        self._is_empty = False

    def results(self, examples: int, model: Model) -> Measures:
        """Return the measures; a metric replaces a measure of its name.

        ``examples``: number in all parts, at least one.

        Raises:
            ConfigError: a metric raises.
        """
        total = self.weight if as_model(model).weighs_measures else examples
        of = dict.fromkeys(self.measures, total) | {"loss": self.weight}
        own = {name: value / of[name] for name, value in self.measures.items()}
        return own | self.metrics.results()


def rows_of(batch_size: int) -> int:
    """Return the number of examples to measure at a time, for which a training step has room."""
    return min(ROWS, 4 * batch_size)


def parts_of(examples: int, rows: int = ROWS) -> list[range]:
    """Return the parts of a data set, each of the same multiple of ``rows``, but the last."""
    blocks = -(-examples // rows)
    size = max(1, -(-blocks // PARTS)) * rows
    return [range(start, min(start + size, examples)) for start in range(0, examples, size)]


def evaluate(
    model: Model,
    parameters: Parameters,
    dataset: Dataset,
    metrics: Sequence[Metric] = (),
    rows: int = ROWS,
) -> Measures:
    """Return the model's measures, averaged over all examples, and the metrics.

    A metric replaces a measure of its name. ``rows``: examples at a time.

    Raises:
        ConfigError, DataError: the model, a metric or the dataset raises, or the model returns
            something wrong, or there are no examples.
    """
    check_not_empty(dataset, "evaluate")
    sums = PartSums(metrics)
    for part in parts_of(len(dataset), rows):
        of_part = measure(model, parameters, dataset, part, metrics, rows)
        if of_part is not None:
            sums.add(of_part)
    return sums.results(len(dataset), model)


def measure(
    model: Model,
    parameters: Parameters,
    dataset: Dataset,
    part: range,
    metrics: Sequence[Metric],
    rows: int,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> PartSums | None:
    """Return the sums over the examples of one part; None if cancelled.

    Raises:
        ConfigError, DataError: as for :func:`evaluate`.
    """
    sums = PartSums(metrics)
    for batch, count in _batches(dataset, part, rows):
        if is_cancelled():
            return None
        _begin(parameters)
        with user_code("metrics()", model):
            # A model may write to its inputs, which its predictions need, too.
            given = copied(batch) if metrics else batch
            measures = _numbers(model, model.metrics(parameters, given))
        weight, others = weights_of(as_model(model), batch, count)
        of = dict.fromkeys(measures, others) | {"loss": weight}
        sums.add_measures({n: weighted(value, of[n]) for n, value in measures.items()}, weight)
        if metrics:
            outputs = outputs_of(model, parameters, batch, count)
            if not part.start and not sums.metrics.sums:  # the first batch of all
                for metric in metrics:
                    check_sums(metric, outputs, batch, model)
            sums.metrics.add(outputs, batch, model)
    return sums


def predict(
    model: Model, parameters: Parameters, dataset: Dataset, rows: int = ROWS
) -> Array | tuple[Array, ...]:
    """Return the model's outputs for all examples, one row each; a tuple if there are several.

    Raises:
        ConfigError, DataError: as for :func:`evaluate`; or there are no examples.
    """
    check_not_empty(dataset, "predict")
    batches = _batches(dataset, range(len(dataset)), rows)
    parts = [outputs_of(model, parameters, *each) for each in batches]
    several = [tuple(map(_unmasked, p if isinstance(p, tuple) else (p,))) for p in parts]
    try:
        outputs = concatenated(several, f"the outputs of {model!r}")
    except DataError as error:
        raise DataError(
            f"{error}, or predict all examples in one batch: batch_size={len(dataset)}"
        ) from error
    return outputs if isinstance(parts[0], tuple) else outputs[0]


def check_not_empty(dataset: Dataset, purpose: str) -> None:
    if not len(dataset):
        raise DataError(f"there are no examples to {purpose}; expected at least one")


def _unmasked(array: Array) -> Array:
    """Return all values of an array, including masked ones."""
    return array.data if isinstance(array, np.ma.MaskedArray) else array


def outputs_of(model: Model, parameters: Parameters, batch: Batch, examples: int) -> Any:
    """Return the predictions for a batch with ``examples`` examples: an array, or a tuple of them.

    Raises:
        ConfigError: the model cannot predict, raises, or returns no row for each example.
    """
    _begin(parameters)
    with user_code("predict()", model):
        outputs = as_model(model).predict(parameters, batch)
    for array in outputs if isinstance(outputs, tuple) else (outputs,):
        if np.shape(array)[:1] != (examples,):
            raise ConfigError(
                f"predict() of {model!r} returned outputs of shape {np.shape(array)} for "
                f"{examples} examples; expected one row for each"
            )
    return outputs


def _begin(parameters: Parameters) -> None:
    """Forget the rows of the batch before."""
    for value in parameters.values():
        if isinstance(value, TableReader):
            value.begin()


def _batches(dataset: Dataset, part: range, rows: int) -> Iterator[tuple[Batch, int]]:
    """Yield batches, and the number of examples in each."""
    for start in part[::rows]:
        indices = np.arange(start, min(start + rows, part.stop))
        with user_code("take()", dataset, DataError):
            batch = dataset.take(indices)
        yield checked(batch, len(indices), dataset), len(indices)


def _numbers(model: Model, measures: dict[str, float]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in measures.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"metrics() of {model!r} returned {measures!r:.80}; expected a dict of names and "
            'numbers, such as {"loss": 0.25}'
        ) from None
