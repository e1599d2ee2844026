"""The protocols of a model and of its data.

Any object with these methods can be trained; no base class is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

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

    A model with random numbers, such as dropout's, may have ``seed_batch(seed, batch)``. It is
    called with the job's seed and the batch's number before ``loss_and_gradients``.

    A model may have variables that are not trained, by two more methods. Both return named NumPy
    arrays, the same for the same seed on every task; of any dtype but complex numbers and objects.

    ``state(seed)``: variables that a step assigns, such as the statistics of batch normalisation
    or a counter. ``loss_and_gradients`` finds their current values in ``parameters`` and in
    ``out``, and writes new ones into ``out``, if they have changed. An update makes of float16 and
    float32 state the mean over its gradients, of other dtypes the value of its first gradient.
    Under ``sync-replicas`` that is the mean over the workers of a step; under asynchronous policies
    an update has one gradient, so the last one says the value. Float16 and float32 state must be
    finite, as gradients must; state that begins with NaN or infinity, such as a mask, is frozen.

    ``frozen(seed)``: variables that nobody changes. They are in ``parameters`` alone, and in no
    message.

    A model whose variables have several names, such as tied weights, may have ``aliases()``: the
    first name of each other one. ``initial`` may then use any of them.

    A model whose initial values take long may have ``empty(method)``: what its method of this name,
    "parameters" or "state", returns, but with any values. Most tasks need no more.

    For loops of the user's own (``zmqtrain.attach``) an adapter's model splits a step in two:
    ``begin(parameters, batch, out)`` returns what the loop is given, ``finish(loss, ...)`` takes
    what it hands over, completes ``out`` and returns the loss as a number. ``module``, if there is
    one, is what the loop trains.

    With ``predict(parameters, batch)``, which returns an array of one row an example, a model can
    be asked for its outputs.
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
