"""A model and its data: what they must have, and what a model may have.

Any object with these methods can be trained; no base class is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

from zmqtrain.errors import ConfigError

Array: TypeAlias = Any
"""A NumPy or CuPy array: a model is written once for both."""

Parameters: TypeAlias = Mapping[str, Array]
"""All variables by name: trained (float32), state, frozen."""

Outputs: TypeAlias = tuple[Any, "Batch"]
"""Outputs for a batch, a row an example (of several outputs a tuple), and the batch itself."""

Gradients: TypeAlias = MutableMapping[str, Array]
"""A buffer for each trained variable, for its gradient, and for each state variable, for its new
value."""


class Buffers(dict[str, Array]):
    """Gradient buffers that call back when some of them are complete, or a batch is measured."""

    def __init__(
        self,
        values: Mapping[str, Array],
        on_written: Callable[[Mapping[str, Array], Sequence[str]], None] | None = None,
        on_measured: Callable[..., None] | None = None,
    ) -> None:
        super().__init__(values)
        self.on_written, self.on_measured = on_written, on_measured


def written(out: Gradients, *names: str) -> None:
    """Report that the gradients of these variables are complete and will not be written again.

    A model may call this in ``loss_and_gradients``, with its ``out``. If the job's ``overlap`` is
    on, these gradients are sent while the model computes the others.
    """
    if isinstance(out, Buffers) and out.on_written is not None:
        out.on_written(out, names)


def is_measured(out: Gradients) -> bool:
    """Say whether measures of the batch are of use: those of steps are, in a job with epochs."""
    return isinstance(out, Buffers) and out.on_measured is not None


def measured(
    out: Gradients,
    examples: int,
    means: Mapping[str, float],
    outputs: Callable[[], Outputs | None] | None = None,
) -> None:
    """Report what was measured of a batch, or of a part of it, before its update.

    A model may call this in ``loss_and_gradients``, with its ``out``. ``means``: over so many
    examples, by name, as ``metrics`` has them. ``outputs`` is called at once, and only if the job
    has metrics; None: there are none.
    """
    if isinstance(out, Buffers) and out.on_measured is not None:
        out.on_measured(examples, means, outputs)


Batch: TypeAlias = tuple[Array, ...]
"""Arrays that share their first axis, one row an example; usually (features, labels).

A training batch (features, labels, weights) has a weight for each example, float32 of shape (n,):
its loss is sum(weight * loss of the example) / n, as in Keras. A job's ``class_weight`` adds that
array, or multiplies it. A model whose batches have more than two arrays says by ``labels_at`` which
of them holds the labels: arrays of features are before it, weights behind it.
"""


@runtime_checkable
class Model(Protocol):
    """A network: its parameters, its gradient, its measures.

    These three methods are enough. :class:`BaseModel` lists all others, which any model may have,
    with that base class or without it.
    """

    def parameters(self, seed: int) -> dict[str, Array]:
        """Return the initial values of what is trained: float32 NumPy arrays in creation order.

        The same seed gives the same values on every task of the cluster.
        """
        ...

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        """Write the gradient of the mean loss over ``batch`` into ``out``; return that loss.

        Every element of a gradient must be overwritten, since the buffers are not cleared between
        steps. ``parameters`` must not be written to: they are read-only, but for those that are
        trained by one worker alone, where a write counts.
        """
        ...

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        """Return mean measures over ``batch``: ``loss``, and ``accuracy`` if that makes sense."""
        ...


class BaseModel(ABC):
    """All that the engine may ask of a model, with defaults for a model that lacks it.

    Two kinds of variables are not trained: :meth:`state` and :meth:`frozen` return them as named
    NumPy arrays, the same for the same seed on every task, of any dtype but complex and object.
    """

    # Attributes are of type Any, so that a model may compute them in a property.

    labels_at: Any = None
    """The number of the array of a batch that holds the labels; None: the second of two."""
    has_classes_second: Any = False
    """Whether outputs with more than two axes have their classes on the second one."""
    loss_adds_up: Any = False
    """Whether the loss is known to be a sum over its batch instead of a mean."""
    optimizer: Any = None
    """The update rule that the model brings along."""
    summed_metrics: Any = ()
    """The metrics of zmqtrain that it brings along, for a job without any."""
    compiled_metrics: Any = ()
    """The same as objects of its framework, for callbacks of that."""
    directions: Any = MappingProxyType({})
    """Whether its measures should be large, by name."""
    suffixes: Any = ()
    """Those of files that :meth:`save` writes and :meth:`read_weights` reads."""
    module: Any = None
    """What a loop of the user's own trains, such as a module of PyTorch."""

    @abstractmethod
    def parameters(self, seed: int) -> dict[str, Array]:
        """See :class:`Model`."""

    @abstractmethod
    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        """See :class:`Model`."""

    @abstractmethod
    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        """See :class:`Model`."""

    def state(self, seed: int) -> dict[str, Array]:
        """Return variables that a step assigns, such as statistics of batch normalisation.

        ``loss_and_gradients`` finds their values in ``parameters`` and in ``out``, and writes new
        ones into ``out``, if they have changed. An update makes of float16 and float32 state the
        mean over its gradients, of other dtypes the value of its first gradient. Under
        ``sync-replicas`` that is the mean over the workers of a step; under asynchronous policies
        an update has one gradient, so the last one says the value. Float16 and float32 state must
        be finite, as gradients must; state that begins with NaN or infinity, such as a mask, is
        frozen.
        """
        return {}

    def frozen(self, seed: int) -> dict[str, Array]:
        """Return variables that nobody changes: they are in ``parameters``, and in no message."""
        return {}

    def empty(self, method: str) -> dict[str, Array] | None:
        """Return what "parameters" or "state" returns, but with any values, which most tasks do
        not need; None: the values are no effort."""
        return None

    def aliases(self) -> dict[str, str]:
        """Return the first name of each other name of a variable, such as a tied weight."""
        return {}

    def seed_batch(self, seed: int, batch: int) -> None:
        """Seed random numbers, such as dropout's, before ``loss_and_gradients`` of a batch."""
        return

    def predict(self, parameters: Parameters, batch: Batch) -> Any:
        """Return outputs, one row an example; of several outputs a tuple."""
        raise ConfigError(
            f"{self!r} has no method predict(parameters, batch), which metrics and predictions "
            "need; give it one that returns a row for each example"
        )

    def hold(self, parameters: Parameters, out: Gradients) -> None:
        """Have :attr:`module` hold the parameters of the next step."""
        return

    def begin(self, parameters: Parameters, batch: Batch, out: Gradients) -> Any:
        """Begin a step of a loop of the user's own; return what the loop is given."""
        return parameters, batch, out

    def finish(self, loss: Any, *results: Any) -> float:
        """Complete ``out`` by what the loop hands over; return the loss."""
        return float(loss)

    def arrays_of(self, examples: Mapping[str, Any]) -> Sequence[Any]:
        """Return inputs or targets by name in the order of a batch."""
        raise ConfigError(
            f"examples are arrays by name, and {self!r} knows no names; expected a tuple of "
            "arrays, such as (features, labels)"
        )

    def read_weights(self, path: Any) -> Mapping[str, Array]:
        """Return all variables, with those in a file of the model's framework."""
        raise NotImplementedError

    def save(self, path: Any, weights: Mapping[str, Array], *, overwrite: bool = True) -> None:
        """Write weights into a file of the model's framework."""
        raise NotImplementedError

    def with_weights(self, weights: Mapping[str, Array]) -> Any:
        """Return an object of the framework with these weights, for callbacks to look at."""
        return None


class Wrapped(BaseModel):
    """Another model, with the methods that this class has instead, and defaults for the rest."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in vars(type(self)):
            return super().__getattribute__(name)
        try:
            return getattr(self._model, name)
        except AttributeError:
            return super().__getattribute__(name)

    def parameters(self, seed: int) -> dict[str, Array]:
        found: dict[str, Array] = self._model.parameters(seed)
        return found

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        loss: float = self._model.loss_and_gradients(parameters, batch, out)
        return loss

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        measures: dict[str, float] = self._model.metrics(parameters, batch)
        return measures

    def __repr__(self) -> str:
        return repr(self._model)  # all tasks have the same fingerprint


def as_model(model: Any) -> BaseModel:
    """Return a model with all methods: one of another class gets those that it lacks."""
    return model if isinstance(model, BaseModel) else Wrapped(model)


@runtime_checkable
class Dataset(Protocol):
    """A finite set of examples that can be addressed by number; without end, a Stream.

    Tasks of one process may call it from several threads at once.

    Data with random numbers, such as augmentation's, may have ``take_seeded(indices, seed,
    passes)``. Training calls it instead of ``take``, with the job's seed and the number of each
    row's pass (int64 (n,)), so that a batch that is computed again is the same.
    """

    def __len__(self) -> int: ...

    def take(self, indices: Array) -> Batch:
        """Return the examples with these numbers (int64, shape (n,)) as one batch of n rows.

        Raises:
            DataError: some of them cannot be read, or not as they are; the text names the place.
            ConfigError: a library that reads them is not installed, or memory does not suffice.
        """
        ...


@runtime_checkable
class Data(Protocol):
    """A source of examples; only tasks that need them call :meth:`load`."""

    def load(self, directory: str | None) -> tuple[Dataset, Dataset | None]:
        """Return (training set, evaluation set or None); with None nothing is evaluated.

        ``directory`` is the job's ``data_dir`` (flag ``--data``), None if not given.

        Raises:
            DataError: the files are missing or damaged; the text names the file and what to do.
        """
        ...
