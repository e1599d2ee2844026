"""Callbacks that look at a measure: stop, keep the best weights, set the learning rate."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any, Literal, TypeAlias

from zmqtrain.callbacks.base import Callback, Logs, Weights
from zmqtrain.errors import ConfigError
from zmqtrain.metrics import larger_is_better, numbers

Mode: TypeAlias = Literal["auto", "min", "max"]

log = logging.getLogger(__name__)


class _Monitor(Callback):
    """Follows one measure and knows the best value so far.

    Mode "auto" follows the measure's metric. Names that end with "loss" or "error" and
    some well-known ones are known without a metric. Other measures need a mode.
    """

    def __init__(self, monitor: str, mode: Mode, min_delta: float = 0.0) -> None:
        super().__init__()
        if mode not in ("auto", "min", "max"):
            raise ConfigError(
                f"{type(self).__name__}: mode is {mode!r}; expected 'auto', 'min' or 'max'"
            )
        self.monitor = monitor
        self._mode = mode
        self._min_delta = abs(min_delta)
        self.best: float | None = None  # of no epoch yet
        self._follow({})

    def begin(self) -> None:
        """Forget the epochs of another training."""

    def set_params(self, params: Mapping[str, Any]) -> None:
        super().set_params(params)
        if params:  # a training begins, not an evaluation
            self.begin()

    def set_model(self, model: Any) -> None:
        """
        Raises:
            ConfigError: it is unknown whether the measure should be large or small.
        """
        super().set_model(model)
        self._follow(getattr(model, "directions", {}))
        if self.monitor is not None and self._sign is None:
            raise ConfigError(
                f"nothing says whether {self.monitor!r} should be large or small; expected a "
                "measure whose metric says it (larger_is_better), or whose name ends with loss or "
                "error; give mode='max' or mode='min'"
            )

    def _follow(self, directions: Mapping[str, bool]) -> None:
        is_max: bool | None = self._mode == "max"
        if self._mode == "auto":
            is_max = larger_is_better(self.monitor or "", directions)
        self._sign = None if is_max is None else 1.0 if is_max else -1.0

    def value(self, logs: Logs | None) -> float | None:
        """Return the measure; None, with a warning, if this epoch does not have it."""
        found = (logs or {}).get(self.monitor)
        if found is None:
            name = type(self).__name__
            log.warning("%s looks for %r, which this epoch has not measured", name, self.monitor)
        return None if found is None else float(found)

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether a value is better by more than min_delta; NaN never is."""
        assert self._sign is not None  # set_model has seen to it
        if than is None:
            return not math.isnan(value)
        return self._sign * (value - than) > self._min_delta

    def state(self) -> dict[str, Any]:
        return {"best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class EarlyStopping(_Monitor):
    """Stops when a measure has not improved for ``patience`` epochs, as in Keras.

    It never stops after the first epoch, which counts as the best one even if its measure is NaN.
    ``restore_best``: the training ends with the weights of the best epoch; after a resume only
    later epochs can be restored. ``baseline``: only a value better than this ends the waiting.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        min_delta: float = 0.0,
        patience: int = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience = patience
        self.restore_best = restore_best
        self.start_from_epoch = start_from_epoch
        self.baseline = baseline
        self.begin()

    def begin(self) -> None:
        self.best, self.wait = None, 0
        self.best_epoch: int | None = None
        self.stopped_epoch: int | None = None
        self._best_weights: Weights | None = None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        value = self.value(logs)
        if value is None or epoch < self.start_from_epoch:
            return
        is_best = self.best is None or self.is_better(value, self.best)
        if self.restore_best and (is_best or self._best_weights is None):
            self._best_weights, self.best_epoch = self.model.weights, epoch
        self.wait += 1
        if is_best:
            self.best, self.best_epoch = value, epoch
            if self.baseline is None or self.is_better(value, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._best_weights is not None and self.model.weights is not self._best_weights:
            self.model.set_weights(self._best_weights)

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "wait": self.wait, "best_epoch": self.best_epoch}


class ModelCheckpoint(_Monitor):
    """Writes the weights into a file after each epoch, or after each that is the best so far.

    ``path`` may name the epoch (from 1) and measures: ``"run/{epoch:02d}-{val_loss:.3f}.npz"``. It
    ends with .safetensors, which is added if there is no ending, or with .npz. To resume a job,
    give it a logdir: these files hold weights alone.
    """

    keeps_files = True

    def __init__(
        self,
        path: str | Path,
        monitor: str = "val_loss",
        *,
        save_best_only: bool = False,
        mode: Mode = "auto",
    ) -> None:
        super().__init__(monitor, mode)
        self.path = str(path)
        self.save_best_only = save_best_only
        try:
            fields = [name for _, name, _, _ in Formatter().parse(self.path) if name is not None]
        except ValueError as error:
            raise ConfigError(f"ModelCheckpoint: the path {self.path!r}: {error}") from None
        self.path_names = [name for name in fields if name.isidentifier() and name != "epoch"]
        if not save_best_only:
            self.monitor = None  # type: ignore[assignment]  # nothing needs to be measured

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.save_best_only:
            value = self.value(logs)
            if value is None or not self.is_better(value, self.best):
                return
            self.best = value
        self.model.save_weights(self._path(epoch, logs or {}))

    def _path(self, epoch: int, logs: Logs) -> str:
        known = {"epoch": epoch + 1} | {k: v for k, v in numbers(logs).items() if k != "epoch"}
        try:
            path = self.path.format(**known)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"ModelCheckpoint: the path {self.path!r} cannot be filled in: {error!r}; it may "
                f"name {', '.join(known)} in braces"
            ) from None
        ending = Path(self.path).suffix
        has_ending = ending and not ending.endswith("}")  # as of "{val_loss:.3f}"
        return path if has_ending else f"{path}.safetensors"


class LearningRateScheduler(Callback):
    """Sets the learning rate at the beginning of each epoch: ``schedule(epoch, rate)``."""

    sets_learning_rate = True

    def __init__(self, schedule: Callable[..., float]) -> None:
        super().__init__()
        self.schedule = schedule

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        optimizer = self.model.optimizer
        optimizer.learning_rate = self.schedule(epoch, optimizer.learning_rate)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = self.model.optimizer.learning_rate


class ReduceLROnPlateau(_Monitor):
    """Multiplies the learning rate by ``factor`` when a measure has not become better for
    ``patience`` epochs, but not below ``min_lr``; then waits ``cooldown`` epochs."""

    sets_learning_rate = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if not 0 < factor < 1:
            raise ConfigError(f"ReduceLROnPlateau: factor is {factor}; expected above 0, below 1")
        self.factor, self.patience, self.cooldown, self.min_lr = factor, patience, cooldown, min_lr
        self.begin()

    def begin(self) -> None:
        self.best, self.wait, self.cooling = None, 0, 0

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        rate = self.model.optimizer.learning_rate
        if logs is not None:
            logs["learning_rate"] = rate
        value = self.value(logs)
        if value is None:
            return
        if self.cooling:
            self.cooling -= 1
            self.wait = 0
        if self.is_better(value, self.best):
            self.best, self.wait = value, 0
        elif not self.cooling:
            self.wait += 1
            if self.wait >= self.patience and rate > self.min_lr:
                self.model.optimizer.learning_rate = max(rate * self.factor, self.min_lr)
                self.cooling, self.wait = self.cooldown, 0

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "wait": self.wait, "cooling": self.cooling}
