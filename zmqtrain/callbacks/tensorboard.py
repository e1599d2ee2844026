"""Event files for TensorBoard, by tensorboardX."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from zmqtrain.callbacks.base import Callback, Logs
from zmqtrain.hints import imported
from zmqtrain.metrics import numbers
from zmqtrain.models.base import Batch
from zmqtrain.observe.metrics import Phases
from zmqtrain.protocol.status import Status


class TensorBoard(Callback):
    """Writes the measures of each epoch, examples per second and histograms of the weights.

    Measures of training and validation share a chart. In a cluster it also writes the staleness, of
    all workers and of each, and the time that each spent in each phase of its steps.
    With an ``update_freq`` it writes all of this by global step, and measures also by epoch.
    """

    keeps_files = True

    def __init__(
        self,
        logdir: str | Path,
        *,
        update_freq: int | Literal["epoch"] = "epoch",
        histograms_every: int = 0,
        gradients_of: Batch | None = None,
    ) -> None:
        """``update_freq``: steps between two summaries, or "epoch". ``histograms_every``:
        epochs, or summaries, between histograms; 0: none. ``gradients_of``: a batch, such as
        ``(x[:64], y[:64])``, of whose gradients there are histograms, too.

        Raises:
            ConfigError: tensorboardX is not installed.
        """
        super().__init__()
        self.logdir, self.histograms_every = Path(logdir), histograms_every
        self.every_steps = 0 if update_freq == "epoch" else update_freq
        self._batch = gradients_of
        self._spent_s: dict[str, tuple[float, ...]] = {}  # by worker, in phases of its steps
        self._make_writer = imported("tensorboardX", "tensorboard").SummaryWriter
        self._writers: dict[str, Any] = {}
        self._began_at = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._began_at = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        for name, value in numbers(logs or {}).items():
            kind = "validation" if name.startswith("val_") else "train"
            self._writer(kind).add_scalar(f"epoch_{name.removeprefix('val_')}", value, epoch)
        if not self.every_steps:
            self._write(epoch, number=epoch)

    def on_steps(self, step: int, logs: Logs | None = None) -> None:
        for name, value in numbers(logs or {}).items():
            self._writer("train").add_scalar(f"batch_{name}", value, step)
        self._write(step, number=step // self.every_steps)

    def on_test_end(self, logs: Logs | None = None) -> None:
        for name, value in numbers(logs or {}).items() if self.every_steps else ():
            tag = f"evaluation_{name}_vs_iterations"  # Keras's
            self._writer("validation").add_scalar(tag, value, self.model.step)

    def on_train_end(self, logs: Logs | None = None) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def write(self, kind: str, values: Mapping[str, Any], step: int) -> None:
        """Write numbers as scalars and arrays, of any framework, as histograms of ``kind``."""
        writer = self._writer(kind)
        for name, value in values.items():
            detached = value.detach().float().cpu() if hasattr(value, "detach") else value
            array = np.asarray(detached)
            (writer.add_histogram if array.ndim else writer.add_scalar)(name, array, step)

    def _write(self, at: int, *, number: int) -> None:
        """Write values that are not measures at this epoch or step, to summary ``number``."""
        write, now = self._writer("train"), time.monotonic()
        speed = self.model.examples / max(now - self._began_at, 1e-9)
        write.add_scalar("examples_per_second", speed, at)
        self._began_at = now
        if self.model.status is not None:
            self._write_status(self.model.status, at)
        if self.histograms_every and number % self.histograms_every == 0:
            for name, value in self.model.weights.items():
                write.add_histogram(name, value, at)
            gradients = {} if self._batch is None else self.model.gradients(self._batch)
            for name, value in gradients.items():
                write.add_histogram(f"gradients/{name}", value, at)
        for writer in self._writers.values():
            writer.flush()

    def _write_status(self, status: Status, epoch: int) -> None:
        write = self._writer("train").add_scalar
        for name, value in status.staleness.items():
            write(f"staleness/{name}", value, epoch)  # of all gradients so far
        if status.rounds:
            write("rounds/number", status.rounds, epoch)
        for name, value in status.of_rounds.items():
            write(f"rounds/{name}", value, epoch)
        for name, table in status.tables.items():
            for figure in ("trained", "nbytes", "updated", "forgotten"):
                write(f"tables/{name}/{figure}", getattr(table, figure), epoch)
        for worker in (task for task in status.tasks if task.role == "worker"):
            tag = worker.task.replace(" ", "_")  # TensorBoard takes no blanks
            write(f"staleness/{tag}", worker.staleness, epoch)
            before = self._spent_s.get(tag, (0.0,) * len(worker.phases_s))
            for phase, then, now in zip(fields(Phases), before, worker.phases_s, strict=False):
                write(f"{phase.name}_s/{tag}", max(0.0, now - then), epoch)
            self._spent_s[tag] = worker.phases_s

    def _writer(self, kind: str) -> Any:
        if kind not in self._writers:
            self._writers[kind] = self._make_writer(str(self.logdir / kind))
        return self._writers[kind]
