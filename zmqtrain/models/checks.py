"""Checks of a model's arguments, batches and loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Array, Batch, Gradients, Model, Parameters, as_model
from zmqtrain.models.trees import are_rows, kind_of
from zmqtrain.units import counted
from zmqtrain.user_code import user_code


def check_sizes(owner: str, **sizes: int) -> None:
    """Raise ConfigError unless every size that ``owner`` is given is an int of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or size < 1:
            raise ConfigError(
                f"{owner}: {name} is {size!r}; expected an int of at least 1; correct {name}"
            )


def check_rows(batch: Batch, owner: object) -> None:
    """Raise ConfigError unless a batch is a tuple of arrays."""
    if not are_rows(batch):
        raise ConfigError(
            f"a batch for {owner!r} is {kind_of(batch)}; expected a tuple of arrays, such as "
            "(features, labels): make one in collate_fn, or train a model of PyTorch or JAX"
        )


def features_of(batch: Batch, features: int) -> Array:
    """Return the batch's first array, checked to be (n, ``features``).

    Raises:
        ConfigError: it is not; the job's model and data do not fit.
    """
    check_rows(batch, "the model")
    inputs = batch[0]
    if inputs.ndim != 2 or inputs.shape[1] != features:
        raise ConfigError(
            f"the data gives features of shape {inputs.shape}; the model expects "
            f"(n, {features}); set the model's features to the width of the data"
        )
    return inputs


def examples_of(batch: Batch, features: int) -> tuple[Array, Array]:
    """Return the batch's (features (n, ``features``), answers (n, ...)).

    Raises:
        ConfigError: the batch is something else; the job's model and data do not fit.
    """
    check_rows(batch, "the model")
    if len(batch) not in (2, 3):
        raise ConfigError(
            f"the data gives batches of {counted(len(batch), 'array')}; expected 2, (features, "
            "labels), or weights behind them; correct Dataset.take or choose another model"
        )
    inputs, answers = features_of(batch, features), batch[1]
    if len(batch) == 3 and batch[2].shape != inputs.shape[:1]:
        raise ConfigError(
            f"the data gives weights of shape {batch[2].shape}; expected one for each example: "
            f"{inputs.shape[:1]}"
        )
    if answers.shape[:1] != inputs.shape[:1]:
        raise ConfigError(
            f"the data gives features of shape {inputs.shape} and labels of shape "
            f"{answers.shape}; expected one label for each row; correct Dataset.take"
        )
    return inputs, answers


def labelled(batch: Batch, features: int, classes: int) -> tuple[Array, Array]:
    """Return the batch's (features (n, ``features``), labels (n,)), class numbers from 0 on.

    Raises:
        ConfigError: the batch is something else; the job's model and data do not fit.
    """
    inputs, labels = examples_of(batch, features)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ConfigError(
            f"the data gives labels of shape {labels.shape} and dtype {labels.dtype}; expected "
            "class numbers: integers of shape (n,); convert one-hot labels with argmax"
        )
    check_classes(labels, classes)
    return inputs, labels


def check_classes(labels: Array, classes: int) -> None:
    """Raise ConfigError unless all labels, of any shape but empty, are numbers of classes."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ConfigError(
            f"the data gives labels from {low} to {high}; the model has {classes} classes and "
            f"expects 0 to {classes - 1}; set the model's classes or renumber the labels"
        )


# The first steps, in which frozen parameters are compared. One would not suffice: a copy that
# follows a trained parameter changes only after that, and the learning rate may begin at 0.
FROZEN_CHECKS = 3


class CheckSchedule:
    """Picks steps 1, 2, 3, 5, 8, 13, ... for checks that cost too much for every step.

    Each number k divides one of these, so a mistake in every k-th step is found, too.
    """

    def __init__(self) -> None:
        self._step, self._next, self._after_next = 0, 1, 2

    def is_due(self) -> bool:
        """Count a step; return whether it is to be checked."""
        self._step += 1
        if self._step < self._next:
            return False
        self._next, self._after_next = self._after_next, self._next + self._after_next
        return True


def written_in_a_step(
    model: object, name: str, *, is_frozen: bool = False, how: str = "writes to"
) -> ConfigError:
    """Return the error of a model that changes a parameter which a step may only read."""
    if is_frozen:
        return ConfigError(
            f"a step of {model!r} {how} {name!r}, which is frozen: the change would be neither "
            "saved nor the same on every worker; expected a step that only reads it: make it state "
            "(in PyTorch a buffer)"
        )
    return ConfigError(
        f"a step of {model!r} {how} the parameter {name!r}, which other tasks use too, so the "
        "change would not count; expected a step that only reads it, without max_norm=, clamp_() "
        "or copy_(): compute the changed value from it, such as normalize(weight), or train with "
        "one worker and no ps, where it counts"
    )


def labels_at(model: object, batch: Batch, for_what: object, is_weighted: bool = False) -> int:
    """Return which array of a batch holds the labels: features are before it, weights behind it.

    That is the model's ``labels_at``; without it, batches of two arrays are (features, labels).
    ``is_weighted``: the job has put weights behind the labels.

    Raises:
        ConfigError: the model has no ``labels_at``, or it is not an index of a batch.
    """
    if not are_rows(batch):
        raise ConfigError(
            f"{for_what!r} needs labels, and a batch of {model!r} is {kind_of(batch)}; expected a "
            "tuple of arrays, such as (features, labels): leave it out, and let the model's own "
            "metrics and loss do this"
        )
    at = as_model(model).labels_at
    if at is None and is_weighted:
        at = len(batch) - 2
    if at is None and len(batch) > 2:
        raise ConfigError(
            f"{for_what!r} needs labels, and a batch of {model!r} has {len(batch)} arrays; "
            "expected the model to name the labels: give it labels_at, such as "
            "labels_at=1 for (features, labels, weights) or labels_at=2 for (users, items, ratings)"
        )
    if at is not None and (type(at) is not int or not 0 < at < len(batch)):
        raise ConfigError(
            f"{for_what!r} needs labels, and labels_at of {model!r} is {at!r}, but a batch has "
            f"{counted(len(batch), 'array')}; expected the number of the one that holds the "
            "labels, counted from 0"
        )
    return 1 if at is None else at


def checked_loss(
    model: Model,
    parameters: Parameters,
    batch: Batch,
    out: Gradients,
    details: Callable[[], str] = str,
) -> float:
    """Call the model's ``loss_and_gradients``; ``details`` returns text for an error message.

    Raises:
        ConfigError: the model raises or returns no number.
    """
    with user_code("loss_and_gradients()", model, details=details):
        loss = model.loss_and_gradients(parameters, batch, out)
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise ConfigError(
            f"loss_and_gradients() of {model!r} returned {loss!r:.80}; expected a number: return "
            "the mean loss over the batch"
        ) from None
