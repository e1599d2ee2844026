"""Training in Keras's manner: `zmqtrain.Trainer(model, optimizer).fit(data, epochs=5)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.callbacks import History, ModelView, ProgressBar
from zmqtrain.callbacks.base import CallbackList
from zmqtrain.compute.generators import generators_kept
from zmqtrain.config.fit_script import fit_in_script, refuse_while_loading
from zmqtrain.data import NoisyLine
from zmqtrain.data.coerce import Holdout, data_of, first_batches, to_measure, weighted
from zmqtrain.errors import ConfigError
from zmqtrain.fingerprint import in_short
from zmqtrain.hints import no_option
from zmqtrain.job import Job
from zmqtrain.local.in_process import train_as, train_here
from zmqtrain.metrics import Measures, checked
from zmqtrain.models import LinearRegression
from zmqtrain.models.base import Model, Parameters, as_model
from zmqtrain.models.checks import check_sizes
from zmqtrain.models.rows import TableReader, readers_of
from zmqtrain.observe.summary import NotHere, Summary
from zmqtrain.optim import SGD
from zmqtrain.roles.script import job_of_script, mistakes_end_a_task, task_of_script
from zmqtrain.store.checkpoint import checkpoints_directory
from zmqtrain.store.weights import load, named_arrays
from zmqtrain.training import evaluation
from zmqtrain.user_code import mistakes_in_short

_OF_FIT = {"model", "data", "optimizer", "epochs", "callbacks", "class_weight", "steps_per_epoch"}
"""Fields of the job that are arguments of ``Trainer`` or ``fit``."""

_OF_MODEL = {"inner", "tables", "groups"}
"""Options that only a job with the model can check."""

QUICK_BATCHES = 3
"""Batches of an epoch of ``fast_dev_run``."""

BATCH_SIZE = 32
"""Examples in a batch of :meth:`Trainer.fit` by default, as in Keras."""

_OF_KERAS: dict[str, tuple[tuple[Any, ...], str]] = {
    "shuffle": ((True,), "each pass has an order of its own, by the seed"),
    "initial_epoch": ((0,), "with a logdir a second fit goes on where the first one ended"),
    "validation_steps": ((None,), "all validation data are measured: give fewer"),
    "validation_freq": ((1,), "validation data are measured after each epoch"),
    "validation_batch_size": ((None,), "validation data are measured in batches of batch_size"),
    "steps": ((None,), "all examples count: give fewer"),
    "sample_weight": ((None,), "give the weights behind the labels: (features, labels, weights)"),
    "return_dict": ((True,), "the measures are a dict"),
    "verbose": ((0, False, "auto"), "it shows no progress"),
}
"""Arguments of Keras's methods: their values that ask for what is done here, and what that is."""


class Trainer:
    """A model with its optimizer and its weights.

    ``history``, ``summary`` and ``logdir`` are those of the last :meth:`fit`.
    """

    @mistakes_in_short
    @mistakes_end_a_task()
    def __init__(
        self,
        model: Model,
        optimizer: Any = None,
        *,
        metrics: Sequence[Any] = (),
        logdir: str | Path | None = None,
        workers: int | None = None,
        ps: int | None = None,
        **options: Any,
    ) -> None:
        """``metrics``: measured on validation data and, if they are few numbers, in training; see
        :mod:`zmqtrain.metrics`. A compiled Keras model brings its own metrics and optimizer.

        ``logdir``: where the job is saved; a later :meth:`fit` with the same one resumes it.
        ``workers``, ``ps``: size of a cluster in this process; one worker needs no ps, and several
        can train without (``ps=0``). ``options``: other fields of :class:`zmqtrain.Job`, such as
        ``policy``, ``seed``, ``clip_norm``.

        Raises:
            ConfigError: an argument is wrong.
            SystemExit: it is, and this process is a task of a cluster; see the log.
        """
        self.model, self.optimizer = model, optimizer
        self.metrics = checked(metrics or as_model(model).summed_metrics)
        self.logdir = None if logdir is None else str(logdir)
        self.history = History()
        self.summary: Summary | None = None
        known = Job.model_fields.keys() - _OF_FIT
        if unknown := [name for name in options if name not in known]:
            if unknown[0] in _OF_FIT:
                raise ConfigError(f"Trainer takes no {unknown[0]}; give {unknown[0]} to fit")
            raise no_option("Trainer", unknown[0], sorted(known))
        try:
            self._initial = named_arrays(options.pop("initial", None), model)
        except TypeError as error:
            raise ConfigError(f"initial is not valid: {error}") from None
        # Checked at once, as far as they depend on no model.
        _job_with({name: value for name, value in options.items() if name not in _OF_MODEL})
        self._workers, self._ps, self._options = workers, ps, options
        self._weights: Parameters | None = None

    @mistakes_in_short
    @mistakes_end_a_task()
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        validation_split: float = 0.0,
        callbacks: Sequence[Any] = (),
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        verbose: bool = True,
        fast_dev_run: bool = False,
        **unknown: Any,
    ) -> History:
        """Train for ``epochs`` passes over ``x``; return the measures after each.

        ``x``, ``validation_data``: a tuple of arrays, a Dataset (also torch's), or a Data, whose
        evaluation set is the default of ``validation_data``. ``fit(features, labels)`` takes two
        arrays. A Keras model with several inputs or outputs takes lists of arrays, or arrays by
        name. ``batch_size``: examples in a batch of one worker, 32 by default, as in Keras.
        ``validation_split``: fraction of the examples, chosen by the job's seed, that is held out
        as validation data. ``epochs`` counts from the start of the logdir's job; without a logdir,
        a second call continues with the weights and new optimizer slots. ``steps_per_epoch``:
        batches of an epoch, instead of a whole pass; the next epoch continues the pass.
        ``class_weight``: weights of classes in the loss, 1 by default. ``sample_weight``: weights
        of the examples in a tuple of arrays, which may also have them as its third array.
        ``verbose``: show progress. ``fast_dev_run``: try everything out in one epoch of a few
        batches, without saving or callbacks that write files. ``unknown``: other arguments of
        Keras are refused, with their equivalents here, unless their values ask for what is done
        anyway, such as ``shuffle=True``.

        If TF_CONFIG, ``ZMQTRAIN_ROLE`` or honcho makes this process a task of a cluster, it is that
        task until the training ends. Every task returns the same measures, but without arrays; the
        weights are in the chief's process and in the logdir.

        Raises:
            KeyboardInterrupt: Ctrl-C; a job with a logdir was saved.
            SystemExit: this process is a task that ended badly, or its variables have a mistake;
                see the code and the log.
            RunFailedError: the training failed; it has the ``exit_code`` and the reason.
            ZmqTrainError: it could not begin.
        """
        refuse_while_loading("Trainer.fit(fast_dev_run=True)" if fast_dev_run else "Trainer.fit")
        _check_call(self.fit, x, unknown, epochs=epochs)
        directory = self._options.get("data_dir")
        train = x if y is None else (x, y)
        if sample_weight is not None:
            train = weighted(train, sample_weight)
        train, validation_data = self._ordered(train), self._ordered(validation_data)
        if validation_split:
            if validation_data is not None:
                raise ConfigError("validation_data and validation_split were given; expected one")
            train = Holdout(train, validation_split, self._options.get("seed", 0))
        data = data_of(train, validation_data, directory)
        shown = [ProgressBar()] if verbose and not fit_in_script() else []
        if fast_dev_run:
            callbacks = [one for one in callbacks if not getattr(one, "keeps_files", False)]
        given = {} if batch_size is None else {"batch_size": batch_size}
        self._check_tables()
        job = Job(
            model=self.model,
            data=data,
            optimizer=self.optimizer,
            metrics=self.metrics,
            initial=self._weights if self.logdir is None and self._weights else self._initial,
            logdir=self.logdir,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch or 0,
            callbacks=[*callbacks, *shown],
            class_weight=dict(class_weight) if isinstance(class_weight, Mapping) else class_weight,
            **{"batch_size": BATCH_SIZE} | self._options | given,
        )
        job = job_of_script(job)
        self.logdir = job.logdir  # which a variable may have named
        if fast_dev_run:
            quick = first_batches(data, directory, QUICK_BATCHES * job.worker_batch_size)
            job = job.with_overrides(epochs=1, steps_per_epoch=0)
            job = job.model_copy(update={"data": quick, "logdir": None})
        self.summary = self._train(job, alone=fast_dev_run)
        self.history = self.summary.history
        if not fast_dev_run:
            self._weights = self.summary.parameters
        self.summary.checked()
        return self.history

    def _check_tables(self) -> None:
        """Refuse a second fit that would begin with new rows of tables."""
        readers = (each for each in (self._weights or {}).values() if isinstance(each, TableReader))
        if self.logdir is None and (one := next(readers, None)) is not None:
            raise ConfigError(
                f"fit was called again, and would begin the table {one.variable.name!r} anew; give "
                "the trainer a logdir, from which it goes on, or train all epochs in one fit"
            )

    def _train(self, job: Job, *, alone: bool) -> Summary:
        workers, ps = self._workers, self._ps
        script = fit_in_script()
        if script is not None and alone:
            script.has_fit = True
        elif script is not None:
            if (workers, ps) != (None, None):
                raise ConfigError(
                    f"Trainer got workers={workers} and ps={ps}, but zmqtrain has started this "
                    "script as a cluster; leave them out"
                )
            job = script.overridden(job)
            self.logdir = job.logdir  # which a flag may have named
            return script.fit(job)
        task = None if alone else task_of_script("Trainer.fit", workers=workers, ps=ps)
        if task is None:  # callbacks show the progress
            return train_here(job, workers=workers, ps=ps, on_progress=lambda status: None)
        if self._weights is not None and self.logdir is None:
            raise ConfigError(
                "fit was called again in a task of a cluster, where only the chief has the weights "
                "to go on from; give the trainer a logdir that all tasks share"
            )
        return train_as(task, job)

    @property
    def weights(self) -> dict[str, NDArray[Any]]:
        """The weights by name: of the last fit, else of the logdir, else the model's first ones."""
        if isinstance(self._weights, NotHere | None) and self.logdir is not None:
            if checkpoints_directory(Path(self.logdir)).is_dir():
                is_average = self._options.get("evaluate_average", False)
                self._weights = load(self.logdir, average=is_average)
        if self._weights is None:
            of_weights = ("seed", "tables")
            given = {name: value for name, value in self._options.items() if name in of_weights}
            job = _job_with(given | {"model": self.model, "initial": self._initial})
            return job.all_values() | readers_of(job.table_variables())
        return dict(self._weights)

    @mistakes_in_short
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        *,
        batch_size: int = evaluation.ROWS,
        callbacks: Sequence[Any] = (),
        **unknown: Any,
    ) -> Measures:
        """Return the model's own measures and the metrics, over all examples.

        As with :meth:`fit` they may be two arrays, ``evaluate(features, labels)``, and ``unknown``
        arguments are refused.

        Raises:
            ConfigError, DataError: the model, a metric or the data is wrong.
        """
        _check_call(self.evaluate, x, unknown, batch_size=batch_size)
        dataset = to_measure(self._ordered(x if y is None else (x, y)))
        with self._calling(callbacks, "test") as logs:
            logs |= evaluation.evaluate(
                self.model, self.weights, dataset, metrics=self.metrics, rows=batch_size
            )
        return logs

    @mistakes_in_short
    def predict(
        self,
        x: Any = None,
        *,
        batch_size: int = evaluation.ROWS,
        callbacks: Sequence[Any] = (),
        **unknown: Any,
    ) -> Any:
        """Return the model's outputs, a row for each example; of several outputs a tuple.

        ``x``: examples, which need no labels.

        Raises:
            ConfigError, DataError: the model cannot predict, or the data is wrong.
        """
        _check_call(self.predict, x, unknown, batch_size=batch_size)
        dataset = to_measure(self._ordered(x))
        with self._calling(callbacks, "predict") as logs:
            outputs = evaluation.predict(self.model, self.weights, dataset, batch_size)
            logs["outputs"] = outputs
        return outputs

    def _ordered(self, examples: Any) -> Any:
        """Return examples with nested lists of arrays as one tuple; by name, as the model has them.

        Raises:
            DataError: the model has other names.
        """
        if isinstance(examples, Mapping):
            ordered = as_model(self.model).arrays_of(examples)
            return examples if ordered is None else tuple(ordered)
        if isinstance(examples, tuple | list) and any(map(_is_nested, examples)):
            parts = [self._ordered(part) for part in examples]
            nested = [part if isinstance(part, tuple | list) else (part,) for part in parts]
            return tuple(array for part in nested for array in part)
        return examples

    @contextmanager
    def _calling(self, callbacks: Sequence[Any], what: str) -> Iterator[dict[str, Any]]:
        """Call the hooks of an evaluation or of predictions, whose logs the block fills."""
        view, called = ModelView(self.model), CallbackList(callbacks)
        view.show(self.weights if callbacks else {})
        called.begin(view, {})
        called.call(f"on_{what}_begin", {})
        logs: dict[str, Any] = {}
        with generators_kept(all_gpus=True):
            yield logs
        called.call(f"on_{what}_end", logs)


def _job_with(options: dict[str, Any]) -> Job:
    """Return a job with these options, and examples of those that it must have.

    Raises:
        ConfigError: an option is wrong.
    """
    parts = {"model": LinearRegression(), "data": NoisyLine(), "optimizer": SGD(0.1), "epochs": 1}
    return Job(**parts | options)


def _check_call(
    method: Callable[..., Any], examples: Any, unknown: Mapping[str, Any], **sizes: int
) -> None:
    """Refuse a call without examples, with arguments that the method lacks, or wrong sizes."""
    called = method.__name__
    for name, given in unknown.items():
        value = bool(given) if isinstance(given, np.bool_) else given
        if name in _OF_KERAS:
            meant, done = _OF_KERAS[name]
            if any(type(value) is type(one) and value == one for one in meant):
                continue
            raise ConfigError(f"{called} got {name} ({in_short(value)}); expected none: {done}")
        if name in Job.model_fields:
            raise ConfigError(f"{called} takes no {name}; give it to Trainer({name}=...)")
        known = [one for one in inspect.signature(method).parameters if one != "unknown"]
        raise no_option(called, name, known)
    if examples is None:
        raise ConfigError(f"{called} got no examples; expected arrays or a data set")
    check_sizes(called, **sizes)


def _is_nested(part: Any) -> bool:
    """Return whether a part of examples holds arrays, and is none."""
    is_list = isinstance(part, tuple | list) and any(hasattr(one, "shape") for one in part)
    return is_list or isinstance(part, Mapping)
