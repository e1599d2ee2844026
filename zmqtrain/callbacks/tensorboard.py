"""Event files for TensorBoard, by tensorboardX."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from zmqtrain.callbacks.base import Callback, Logs
from zmqtrain.errors import imported
from zmqtrain.metrics import numbers
from zmqtrain.models.base import Batch
from zmqtrain.observe.metrics import Phases
from zmqtrain.protocol.status import Status


class TensorBoard(Callback):
    """Writes the measures of each epoch, examples per second and histograms of the weights.

    Measures of training and validation share a chart. In a cluster it also writes the staleness, in
    all and of each worker, and how long each spent in each phase of its steps, such as waiting.
    """

    keeps_files = True

    def __init__(
        self, logdir: str | Path, *, histograms_every: int = 0, gradients_of: Batch | None = None
    ) -> None:
        """``histograms_every``: epochs between histograms; 0: none. ``gradients_of``: a batch, such
        as ``(x[:64], y[:64])``, of whose gradients there are histograms, too.

        Raises:
            ConfigError: tensorboardX is not installed.
        """
        super().__init__()
        self.logdir, self.histograms_every = Path(logdir), histograms_every
        self._batch = gradients_of
        self._spent_s: dict[str, tuple[float, ...]] = {}  # by worker, in phases of its steps
        self._make_writer = imported("tensorboardX", "tensorboard").SummaryWriter
        self._writers: dict[str, Any] = {}
        self._began_at = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._began_at = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        seconds = time.monotonic() - self._began_at
        for name, value in numbers(logs or {}).items():
            kind = "validation" if name.startswith("val_") else "train"
            self._writer(kind).add_scalar(f"epoch_{name.removeprefix('val_')}", value, epoch)
        if examples := self.params.get("examples"):
            self._writer("train").add_scalar("examples_per_second", examples / seconds, epoch)
        if self.model.status is not None:
            self._write_status(self.model.status, epoch)
        if self.histograms_every and epoch % self.histograms_every == 0:
            for name, value in self.model.weights.items():
                self._writer("train").add_histogram(name, value, epoch)
            gradients = {} if self._batch is None else self.model.gradients(self._batch)
            for name, value in gradients.items():
                self._writer("train").add_histogram(f"gradients/{name}", value, epoch)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write_status(self, status: Status, epoch: int) -> None:
        write = self._writer("train").add_scalar
        for name, value in status.staleness.items():
            write(f"staleness/{name}", value, epoch)  # of all gradients so far
        for worker in (task for task in status.tasks if task.role == "worker"):
            write(f"staleness/{worker.task}", worker.staleness, epoch)
            before = self._spent_s.get(worker.task, (0.0,) * len(worker.phases_s))
            for phase, then, now in zip(fields(Phases), before, worker.phases_s, strict=False):
                write(f"{phase.name}_s/{worker.task}", max(0.0, now - then), epoch)
            self._spent_s[worker.task] = worker.phases_s

    def _writer(self, kind: str) -> Any:
        if kind not in self._writers:
            self._writers[kind] = self._make_writer(str(self.logdir / kind))
        return self._writers[kind]
