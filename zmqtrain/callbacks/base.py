"""Callbacks: objects with Keras's hooks, and the view of the training that they get.

A callback needs no base class: hooks that it lacks are not called. All callbacks of a job run in
one process, one after another, and between epochs while nothing is trained. So they may write
files, and none of them has to be called anywhere else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.hints import did_you_mean
from zmqtrain.models.base import Batch, as_model
from zmqtrain.protocol.status import Status
from zmqtrain.store.weights import named_arrays, save
from zmqtrain.user_code import user_code

Logs: TypeAlias = dict[str, Any]
"""Measures of an epoch, a batch or an evaluation; a callback may add to those of an epoch."""

Weights: TypeAlias = dict[str, Any]
"""Arrays by name."""

TWINS = {
    "BackupAndRestore": "a logdir, with which the same fit goes on",
    "SwapEMAWeights": "moving_average=0.99, evaluate_average=True",
    "TensorBoard": "zmqtrain.callbacks.TensorBoard",
}
"""Callbacks of Keras that need its own training, and their counterparts here."""

CHANGING = ("compile", "fit", "train_function", "train_on_batch", "train_step")
"""What a callback may not do with a model of Keras."""

log = logging.getLogger(__name__)


class OptimizerView:
    """The learning rate of the next steps; a callback may set it."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self.changed = False  # by a callback, since the training last looked

    @property
    def learning_rate(self) -> float:
        """
        Raises:
            ConfigError: the optimizer has none.
        """
        if self._rate is None:
            raise ConfigError(
                "this optimizer has no learning rate, which a callback wants to read; use another "
                "optimizer, or leave the callback out"
            )
        return self._rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        try:
            value = float(rate)
        except (TypeError, ValueError):
            value = np.nan
        if not 0 <= value < np.inf:
            raise ConfigError(
                f"a callback sets the learning rate to {rate!r}; expected a number, at least 0"
            )
        if self.learning_rate != value:
            self._rate, self.changed = value, True

    lr = learning_rate

    def get_config(self) -> dict[str, float | None]:
        """Return the learning rate, for callbacks that write down options."""
        return {"learning_rate": self._rate}

    def show(self, rate: float | None) -> None:
        """Make this the rate that callbacks see; None: the optimizer has none."""
        self._rate, self.changed = rate, False


class ModelView:
    """The model as callbacks see it: its weights between two epochs, and a way to stop.

    ``stop_training``: set it to end the training. ``weights``: arrays by name, which must not be
    written to; :meth:`set_weights` replaces them. ``step``: the global step of a hook.
    ``examples``: number of examples of its ``logs``. ``status``: the cluster's status then, as in
    ``zmqtrain status``; None if one worker trains alone. The view of a Keras model also has its
    methods and attributes for inspection, such as ``predict`` and ``layers``.
    """

    def __init__(self, model: Any, metrics: Sequence[Any] = ()) -> None:
        """``metrics``: the job's metrics."""
        self.source = as_model(model)
        self._metrics = metrics
        self._copy: Any = None  # a model of Keras with these weights
        self.stop_training = False
        self.optimizer = OptimizerView()
        self._weights, self._at = Weights(), None
        self.reader: Callable[[], Weights] | None = None  # returns newer ones, or refuses to
        self.weights_changed = False  # by a callback, since the training last looked
        self.step = self.examples = 0
        self.status: Status | None = None

    @property
    def weights(self) -> Weights:
        if self.reader is not None:
            self.show(self.reader())
        return self._weights

    def show(self, weights: Weights, at: Any = None) -> None:
        """Make these the weights that callbacks see; ``at``: see :meth:`BaseModel.save`."""
        self._weights, self.weights_changed, self._copy = weights, False, None
        self.reader, self._at = None, at

    def __getattr__(self, name: str) -> Any:
        """Return what a copy of a model of Keras with these weights has, to look at."""
        is_hidden = name.startswith(("_", "jax_")) or name in CHANGING
        if self._copy is None and not is_hidden:
            self._copy = self.source.with_weights(self.weights)
        if is_hidden or self._copy is None:
            raise AttributeError(
                f"callbacks cannot use {name!r} of a model that zmqtrain trains; they have weights "
                "and set_weights(), gradients(), optimizer.learning_rate and stop_training"
            )
        return getattr(self._copy, name)

    def get_weights(self) -> list[Any]:
        """Return copies of the weights, in the model's order."""
        return [value.copy() for value in self.weights.values()]

    def set_weights(self, weights: Sequence[Any] | Mapping[str, Any]) -> None:
        """Go on with these weights: a list as :meth:`get_weights` returns it, or arrays by name.

        Raises:
            ConfigError: their number, names or shapes are others, or the model has tables.
        """
        self._check_tables("sets")
        names = self.weights.keys()
        if isinstance(weights, Mapping) and weights.keys() == names:
            weights = [weights[name] for name in names]
        values = list(weights.values()) if isinstance(weights, Mapping) else list(weights)
        shapes = [value.shape for value in self.weights.values()]
        if isinstance(weights, Mapping) or [np.shape(value) for value in values] != shapes:
            raise ConfigError(
                f"set_weights() got arrays of shapes {[np.shape(v) for v in values]}; expected "
                f"{dict(zip(self.weights, shapes, strict=True))}; give what get_weights() returned"
            )
        self._weights = {
            name: np.array(value, self.weights[name].dtype)
            for name, value in zip(self.weights, values, strict=True)
        }
        self.weights_changed, self._copy = True, None

    def _check_tables(self, does: str) -> None:
        if tables := self.source.tables(0):
            raise ConfigError(
                f"a callback {does} weights, without the rows of the tables {', '.join(tables)}; "
                "leave it out: checkpoints in a logdir have the weights and rows of one step"
            )

    def gradients(self, batch: Batch) -> Weights:
        """Return the gradients that one batch has at these weights, by name.

        Raises:
            ConfigError: the model raises.
        """
        trained = self.source.parameters(0)
        state = self.source.state(0)
        out = {name: np.zeros_like(self.weights[name]) for name in [*trained, *state]}
        with user_code("loss_and_gradients()", self.source):
            self.source.loss_and_gradients(self.weights, batch, out)
        return {name: out[name] for name in trained}

    def save_weights(self, filepath: str | Path, overwrite: bool = True) -> None:
        """Write the weights into a file ``.safetensors`` or ``.npz``; a model of Keras also into
        ``.weights.h5`` or, between epochs with its optimizer's state, ``.keras``.

        Raises:
            CheckpointError: it cannot be written, or exists and ``overwrite`` is False.
            ConfigError: the model has tables.
        """
        self._check_tables("writes")
        if Path(filepath).exists() and not overwrite:
            raise CheckpointError(f"{filepath} exists already; delete it, or write to another path")
        if Path(filepath).suffix in self.source.suffixes:
            weights = self.weights  # first: newer ones, which a reader returns, have no ``at``
            self.source.save(filepath, weights, self._at)
        else:
            save(filepath, self.weights)

    save = save_weights

    def load_weights(self, filepath: str | Path) -> None:
        """Go on with the weights in such a file.

        Raises:
            ConfigError: it cannot be read, or holds those of another model.
        """
        self.set_weights(named_arrays(filepath, self.source))

    @property
    def directions(self) -> dict[str, bool]:
        """Whether measures should be large, by name; only those whose metric declares it."""
        given = {m.name: getattr(m, "larger_is_better", None) for m in self._metrics}
        known = {name: is_max for name, is_max in given.items() if is_max is not None}
        return {**self.source.directions, **known}

    @property
    def metrics(self) -> list[Any]:
        """The metrics of a compiled model of Keras; its callbacks ask them what is better."""
        return list(self.source.compiled_metrics)


class Callback:
    """A base class for callbacks, with hooks that do nothing.

    ``model`` is a :class:`ModelView`. ``params`` is a dict with ``epochs``, ``steps`` (batches of
    an epoch), ``verbose`` and ``initial_epoch``, which is above 0 in a resumed job. Epochs count
    from 0. ``logs`` hold ``loss`` and other measures of the epoch's batches, each before its update
    (means over the examples, or what a metric makes of the sums over them), and ``val_...`` for
    each measure of the validation data.

    A job without epochs is one epoch of all its steps. ``on_steps(step, logs)`` is called at the
    first step that the chief sees at or after each multiple of ``every_steps`` (0: never), with
    logs of the batches since its last call, or since the epoch began.

    Setting ``model.stop_training`` in a hook of a batch or of steps ends the epoch at once. Set
    weights only in the other hooks.

    To keep plain data when the job is resumed, a callback returns it from ``state()`` and gets it
    in ``restore(state)``, after ``on_train_begin``. ``keeps_files``: left out of a
    ``fast_dev_run``.
    """

    keeps_files = False
    every_steps = 1

    def __init__(self) -> None:
        self.model: Any = None
        self.params: Mapping[str, Any] = {}

    def set_params(self, params: Mapping[str, Any]) -> None:
        self.params = params

    def set_model(self, model: Any) -> None:
        self.model = model

    def on_train_begin(self, logs: Logs | None = None) -> None: ...
    def on_train_end(self, logs: Logs | None = None) -> None: ...
    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None: ...
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None: ...
    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None: ...
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None: ...
    def on_steps(self, step: int, logs: Logs | None = None) -> None: ...
    def on_test_begin(self, logs: Logs | None = None) -> None: ...
    def on_test_end(self, logs: Logs | None = None) -> None: ...
    def on_predict_begin(self, logs: Logs | None = None) -> None: ...
    def on_predict_end(self, logs: Logs | None = None) -> None: ...


class CallbackList:
    """The callbacks of one job, called in order."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks

    def begin(self, model: ModelView, params: Mapping[str, Any]) -> None:
        """Begin a training: callbacks that follow a measure forget its earlier values."""
        self.call("set_params", dict(params))
        self.call("set_model", model)

    def call(self, hook: str, *arguments: Any) -> None:
        """Call one hook of every callback that has it.

        Raises:
            ConfigError: a callback raises; the text names it, and the hook.
        """
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if not callable(method):
                continue
            try:
                with user_code(f"{hook}()", callback):
                    method(*arguments)
            except ConfigError as error:
                if error.__cause__ is not None:  # the text names the callback
                    raise
                name = type(callback).__name__
                raise ConfigError(f"{hook}() of {name} failed: {error}") from error

    def has(self, hook: str) -> bool:
        """Return whether any callback does something at a hook."""
        own = vars(Callback).get(hook)
        methods = [getattr(callback, hook, None) for callback in self._callbacks]
        return any(
            method is not None
            and getattr(method, "__func__", method) is not own
            and not hasattr(method, "_is_default")  # of Keras's base class
            for method in methods
        )

    def check(self, measured: Sequence[str], *, is_all: bool = True) -> None:
        """Check that no callback needs Keras's training, and that what they name is measured.

        Callbacks of other packages may add measures, so they and what comes after them may name
        anything; those of Keras that follow a measure add none. ``is_all``: these are all measures;
        else those of training are not known yet.

        Raises:
            ConfigError: one does, or something is not.
        """
        for kind in (kind for callback in self._callbacks for kind in type(callback).__mro__):
            if kind.__module__.startswith("keras.") and kind.__name__ in TWINS:
                raise ConfigError(
                    f"Keras's {kind.__name__} needs Keras's own training; expected "
                    f"{TWINS[kind.__name__]} in its place"
                )
        known = [*measured, "learning_rate"] if self._sets_rate() else list(measured)
        for callback in self._callbacks:
            monitor = getattr(callback, "monitor", None)
            module = type(callback).__module__
            is_own = module.startswith(f"{__package__}.")
            if not is_own and (monitor is None or not module.startswith("keras.")):
                return
            if not getattr(callback, "save_best_only", True):
                monitor = None
            for name in (monitor, *getattr(callback, "path_names", ())):
                is_val = str(name).startswith("val_")
                if not isinstance(name, str) or name in known or not (is_all or is_val):
                    continue
                without = is_val and not any(each.startswith("val_") for each in known)
                remedy = "; give data to evaluate on" if without else did_you_mean(name, known)
                raise ConfigError(
                    f"{type(callback).__name__} names {name!r}, which is not measured; there are "
                    f"{', '.join(known)}{remedy}"
                )

    def _sets_rate(self) -> bool:
        return any(
            getattr(callback, "sets_learning_rate", type(callback).__name__ == "ReduceLROnPlateau")
            for callback in self._callbacks
        )

    def state(self) -> list[Any]:
        """Return each callback's state to keep across a resume, as plain data.

        Raises:
            ConfigError: a callback raises, or wants to keep something else.
        """
        return [[*_kind_of(callback), self._state_of(callback)] for callback in self._callbacks]

    def _state_of(self, callback: Any) -> Any:
        if not callable(getattr(callback, "state", None)):
            return None
        with user_code("state()", callback):
            state = callback.state()
            return json.loads(json.dumps(state, default=_of_numpy))

    def restore(self, states: Sequence[Any]) -> None:
        """Give each callback its state; those that are others than then begin anew."""
        for callback, kept in zip_longest(self._callbacks[: len(states)], states):
            if callback is None or not isinstance(kept, list) or kept[:2] != _kind_of(callback):
                then = kept[0] if isinstance(kept, list) and kept else "another one"
                now = "nothing" if callback is None else type(callback).__name__
                log.info("%s does not take over the state of the callback %s", now, then)
            elif kept[2] is not None and callable(getattr(callback, "restore", None)):
                with user_code("restore()", callback):
                    callback.restore(kept[2])


def called_by_steps(callbacks: Iterable[Any]) -> list[tuple[Any, int]]:
    """Return the callbacks that are called by steps, and the steps between two calls of each.

    Raises:
        ConfigError: they are not numbers.
    """
    some = [one for one in callbacks if CallbackList([one]).has("on_steps")]
    found = [(one, getattr(one, "every_steps", 1)) for one in some]
    for one, every in found:
        if type(every) is not int or every < 0:
            raise ConfigError(f"every_steps of {type(one).__name__} is {every!r}; expected steps")
    return [(one, every) for one, every in found if every]


def _kind_of(callback: Any) -> list[Any]:
    """Return an identity that a callback and its state must share: its type and its measure."""
    monitor = getattr(callback, "monitor", None)
    return [type(callback).__name__, monitor if isinstance(monitor, str) else None]


def _of_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{value!r:.80} is not plain data, which a callback may keep")
