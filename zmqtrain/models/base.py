"""The interfaces of a model and its data.

Any object with the methods of :class:`Model` can be trained; no base class is needed.
"""

from __future__ import annotations

import cProfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

from zmqtrain.errors import ConfigError
from zmqtrain.models.tables import Ids, Table

Array: TypeAlias = Any
"""A NumPy or CuPy array: a model is written once for both."""

Parameters: TypeAlias = Mapping[str, Array]
"""All variables by name: trained (float32), state, frozen."""

Outputs: TypeAlias = tuple[Any, "Batch"]
"""Outputs for a batch, a row an example (of several outputs a tuple), and the batch itself."""

Gradients: TypeAlias = MutableMapping[str, Array]
"""Buffers by name, for the gradient of each trained variable and the next value of each state."""


class Buffers(dict[str, Array]):
    """Gradient buffers with callbacks for complete gradients and for measures of a batch."""

    def __init__(
        self,
        values: Mapping[str, Array],
        on_written: Callable[[Mapping[str, Array], Sequence[str]], None] | None = None,
        on_measured: Callable[..., None] | None = None,
    ) -> None:
        super().__init__(values)
        self.on_written, self.on_measured = on_written, on_measured
        self.absent: set[str] = set()  # names of variables without a gradient in this step


def written(out: Gradients, *names: str) -> None:
    """Report that the gradients of these variables are complete and will not be written again.

    A model may call this in ``loss_and_gradients``, with its ``out``. If the job's ``overlap`` is
    on, these gradients are sent while the model computes the others.
    """
    if isinstance(out, Buffers) and out.on_written is not None:
        out.on_written(out, names)


def absent(out: Gradients, *names: str) -> None:
    """Report that this step has no gradient of these variables, and that their buffers hold zeros.

    A model may call this in ``loss_and_gradients``, with its ``out``. Variables for which no worker
    of the step has a gradient keep their values, slots and averages, as in torch.optim.
    """
    if isinstance(out, Buffers):
        out.absent.update(names)


def is_measured(out: Gradients) -> bool:
    """Return whether measures of the batch are used: in a job with epochs or callbacks."""
    return isinstance(out, Buffers) and out.on_measured is not None


def measured(
    out: Gradients,
    examples: float | None,
    means: Mapping[str, float],
    outputs: Callable[[], Outputs | None] | None = None,
) -> None:
    """Report measures of a batch, or of a part of it, before its update.

    A model may call this in ``loss_and_gradients``, with its ``out``. ``examples``: of the part;
    None: it is the whole batch. ``means``: mean measures of these examples, as ``metrics`` returns
    them. ``outputs`` is called at once, and only if the job
    has metrics; None: the outputs are not known.
    """
    if isinstance(out, Buffers) and out.on_measured is not None:
        out.on_measured(examples, means, outputs)


Batch: TypeAlias = Any
"""A tuple of arrays that share their first axis, one row an example; usually (features, labels).
Or a tree, such as a dict; see :mod:`zmqtrain.models.trees`.

A training batch (features, labels, weights) has a weight for each example, float32 of shape (n,):
its loss is sum(weight * loss of the example) / n, as in Keras. A job's ``class_weight`` adds that
array, or multiplies it. If batches have more than two arrays, the model's ``labels_at`` is the
index of the labels: features are before them, weights after them.
"""


@runtime_checkable
class Model(Protocol):
    """A network: its parameters, its gradient, its measures.

    These three methods suffice. :class:`BaseModel` lists the optional ones, which any model may
    have, with or without that base class.
    """

    def parameters(self, seed: int) -> dict[str, Array]:
        """Return the initial values of trained variables: float32 arrays in creation order.

        The same seed gives the same values on every task of the cluster.
        """

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        """Write the gradient of the mean loss over ``batch`` into ``out``; return that loss.

        Every element of a gradient must be overwritten: buffers are not cleared between steps.
        ``parameters`` are read-only; without a ps, writes of a single worker to them count.
        """

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        """Return mean measures over ``batch``: ``loss``, and ``accuracy`` if that makes sense."""


class BaseModel(ABC):
    """All methods and attributes of a model that the engine uses, with their defaults.

    Two kinds of variables are not trained: :meth:`state` and :meth:`frozen` return them as named
    NumPy arrays, the same for the same seed on every task, of any dtype but complex and object.
    """

    # Attributes are of type Any, so that a model may compute them in a property.

    labels_at: Any = None
    """The index of the labels in a batch; None: the second of two arrays."""
    has_classes_second: Any = False
    """Whether outputs with more than two axes have their classes on the second one."""
    loss_adds_up: Any = False
    """Whether the loss is known to be a sum over its batch instead of a mean."""
    weighs_measures: Any = True
    """Whether other mean measures have the weight of the loss; else that of the examples."""
    optimizer: Any = None
    """The update rule of a trainer without one."""
    summed_metrics: Any = ()
    """The metrics of a job without any."""
    compiled_metrics: Any = ()
    """The metrics as objects of the framework, for its callbacks."""
    directions: Any = MappingProxyType({})
    """Whether a larger value is better, by the name of the measure."""
    suffixes: Any = ()
    """Suffixes of the files that :meth:`save` writes and :meth:`read_weights` reads."""
    module: Any = None
    """The object that the user's own loop trains, such as a PyTorch module."""

    @abstractmethod
    def parameters(self, seed: int) -> dict[str, Array]:
        """See :class:`Model`."""

    @abstractmethod
    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        """See :class:`Model`."""

    @abstractmethod
    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        """See :class:`Model`."""

    def weight(self, batch: Batch) -> float | None:
        """Return the weight of a batch, see zmqtrain.models.weights; None: count its examples."""
        return None

    def state(self, seed: int) -> dict[str, Array]:
        """Return variables that a step assigns, such as statistics of batch normalisation.

        ``loss_and_gradients`` finds their values in ``parameters`` and in ``out``, and writes new
        ones into ``out``, if they have changed. An update averages float16 and float32 state over
        its gradients; state of other dtypes takes the value of the first gradient. Under
        ``sync-replicas`` this is the mean over the workers of a step; under asynchronous policies
        an update has one gradient, so the last one sets the value. Float16 and float32 state must
        be finite, as gradients must; state that begins with NaN or infinity, as masks, is frozen.
        """
        return {}

    def frozen(self, seed: int) -> dict[str, Array]:
        """Return variables that never change: they are in ``parameters``, but in no message."""
        return {}

    def make_tables(self, patterns: Sequence[Any]) -> None:
        """Let variables whose names fit one of a job's patterns be tables, if the model can.

        Called before any method that names variables. A pattern is a text or a tuple of texts.
        """
        return

    def tables(self, seed: int) -> dict[str, Table]:
        """Return the tables by name: variables of rows, of which a batch reads and trains some.

        Each has a ``dim``, and may have ``rows`` and ``initial``. ``loss_and_gradients`` finds a
        reader in ``parameters``, whose ``take(ids)`` returns rows, and in ``out`` a gradient with
        ``add(ids, rows)``; see :mod:`zmqtrain.models.rows`. Rows that it does not add have none.
        """
        return {}

    def empty(self, method: str) -> dict[str, Array] | None:
        """Return the arrays of the method "parameters" or "state" with any values, for tasks that
        need their shapes alone; None: the values are cheap."""
        return None

    def aliases(self) -> dict[str, str]:
        """Return a variable's first name by each of its other ones, as of a tied weight."""
        return {}

    def seed_batch(self, seed: int, batch: int) -> None:
        """Seed random numbers, such as dropout's, before ``loss_and_gradients`` of a batch."""
        return

    def predict(self, parameters: Parameters, batch: Batch) -> Any:
        """Return the outputs, one row an example; a tuple if there are several."""
        raise ConfigError(
            f"{self!r} has no method predict(parameters, batch), which metrics and predictions "
            "need; add one that returns a row for each example"
        )

    def hold(self, parameters: Parameters, out: Gradients | None) -> None:
        """Have :attr:`module` hold these parameters; ``out``: None after the last step."""
        return

    def refresh(self) -> None:
        """Have :attr:`module` hold the last update, where it has copies of what it holds."""
        return

    def keep_tables(self, readers: Mapping[str, Any]) -> None:
        """Have :attr:`module` hold the rows of these readers of tables, after the last step."""
        return

    def look_ahead(self, batch: Batch) -> Mapping[str, Ids]:
        """Prepare for a batch whose step comes later; any thread may call it.

        Return the sorted unique ids, by table, of the rows that the step is expected to read.
        """
        return {}

    def begin(self, parameters: Parameters, batch: Batch, out: Gradients) -> Any:
        """Begin a step of the user's own loop; return the values that the loop gets."""
        return parameters, batch, out

    def finish(self, loss: Any, *results: Any) -> float:
        """Complete ``out`` from the loop's results; return the loss."""
        return float(loss)

    @contextmanager
    def profiling(self, path: Path) -> Iterator[None]:
        """Profile the block; write ``path`` with a suffix, for viewers of the framework."""
        with cProfile.Profile() as profile:
            yield
        profile.dump_stats(path.with_suffix(".prof"))

    def arrays_of(self, examples: Mapping[str, Any]) -> Sequence[Any] | None:
        """Return inputs or targets by name in the order of a batch; None: a batch is a dict."""
        return None

    def read_weights(self, path: Any) -> Mapping[str, Array]:
        """Return all variables, with the values in a file of the model's framework."""
        raise NotImplementedError

    def save(self, path: Any, weights: Mapping[str, Array], at: Any = None) -> None:
        """Write weights by name into a file of the framework, with the optimizer's state.

        ``at(check, use)`` calls ``check(policy, fingerprint)`` of the job, which may raise, then
        ``use`` with the path of a checkpoint of now; None: there is none.
        """
        raise NotImplementedError

    def with_weights(self, weights: Mapping[str, Array]) -> Any:
        """Return an object of the framework with these weights, for callbacks."""
        return None


class Wrapped(BaseModel):
    """A model whose missing methods are those of another one, or else defaults."""

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
    """Return the model itself if it is a BaseModel; otherwise wrap it to add the defaults."""
    return model if isinstance(model, BaseModel) else Wrapped(model)


@runtime_checkable
class Dataset(Protocol):
    """A finite set of examples, addressed by number; endless data is a Stream.

    Tasks of one process may call it from several threads at once.

    Data with random numbers, such as augmentation's, may have ``take_seeded(indices, seed,
    passes)``. Training calls it instead of ``take``, with the job's seed and the number of each
    row's pass (int64 (n,)), so that a batch that is computed again is the same.
    """

    def __len__(self) -> int: ...

    def take(self, indices: Array) -> Batch:
        """Return the examples with these numbers (int64, shape (n,)) as one batch of n rows.

        Raises:
            DataError: some cannot be read, or would change; the text names the place.
            ConfigError: the library that reads them is not installed, or memory is too small.
        """


@runtime_checkable
class Data(Protocol):
    """A source of examples; only tasks that need them call :meth:`load`."""

    def load(self, directory: str | None) -> tuple[Dataset, Dataset | None]:
        """Return (training set, evaluation set or None); with None nothing is evaluated.

        ``directory`` is the job's ``data_dir`` (flag ``--data``), None if not given.

        Raises:
            DataError: the files are missing or damaged; the text names the file and what to do.
        """
