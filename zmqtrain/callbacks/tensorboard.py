"""Event files for TensorBoard, by tensorboardX."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from zmqtrain.callbacks.base import Callback, Logs
from zmqtrain.errors import ConfigError
from zmqtrain.metrics import numbers


class TensorBoard(Callback):
    """Writes the measures of each epoch, examples per second and histograms of the weights.

    Measures of training and validation share a chart. ``histograms_every``: epochs between
    histograms; 0: none.
    """

    keeps_files = True

    def __init__(self, logdir: str | Path, *, histograms_every: int = 0) -> None:
        """
        Raises:
            ConfigError: tensorboardX is not installed.
        """
        super().__init__()
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(
                "TensorBoard needs tensorboardX; install it with pip install "
                "'zmqtrain[tensorboard]'"
            ) from None
        self.logdir, self.histograms_every = Path(logdir), histograms_every
        self._make_writer = SummaryWriter
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
        if self.histograms_every and epoch % self.histograms_every == 0:
            for name, value in self.model.weights.items():
                self._writer("train").add_histogram(name, value, epoch)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, kind: str) -> Any:
        if kind not in self._writers:
            self._writers[kind] = self._make_writer(str(self.logdir / kind))
        return self._writers[kind]
