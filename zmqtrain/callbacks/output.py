"""Callbacks that show or write measures, or call functions that do."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from zmqtrain.callbacks.base import Callback, Logs
from zmqtrain.callbacks.history import plain
from zmqtrain.errors import ConfigError
from zmqtrain.hints import did_you_mean
from zmqtrain.metrics import numbers
from zmqtrain.observe.summary import as_json
from zmqtrain.texts import printable

REDRAW_S = 0.1


class LambdaCallback(Callback):
    """Calls functions at hooks: ``LambdaCallback(on_epoch_end=lambda epoch, logs: ...)``."""

    def __init__(self, *, every_steps: int = 1, **hooks: Callable[..., object]) -> None:
        """
        Raises:
            ConfigError: there is no hook of a name.
        """
        super().__init__()
        self.every_steps = every_steps
        every = [name for name in dir(Callback) if name.startswith("on_")]
        for name, function in hooks.items():
            if name not in every:
                raise ConfigError(
                    f"LambdaCallback: there is no hook {name!r}{did_you_mean(name, every)}; "
                    f"expected some of {', '.join(every)}"
                )
            setattr(self, name, function)


class CSVLogger(Callback):
    """Writes one line for each epoch: the epoch, then the measures; arrays are left out.

    ``append``: go on with an existing file, as a job does that goes on after its first epoch.
    """

    keeps_files = True

    def __init__(self, path: str | Path, *, separator: str = ",", append: bool = False) -> None:
        super().__init__()
        self.path, self.separator, self.append = Path(path), separator, append
        self._names: list[str] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._names = []
        if not self.append and not self.params.get("initial_epoch"):
            self.path.write_text("")
        elif self.path.exists():
            with self.path.open(newline="") as file:
                self._names = next(csv.reader(file, delimiter=self.separator), [])

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        row: dict[str, Any] = {"epoch": epoch} | numbers(logs or {})
        is_new = not self._names
        self._names = self._names or list(row)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(
                file, self._names, "", extrasaction="ignore", delimiter=self.separator
            )
            if is_new:
                writer.writeheader()
            writer.writerow(row)


class JSONLogger(Callback):
    """Appends one JSON object a line for each epoch; NaN and infinity become null."""

    keeps_files = True

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        row = {"epoch": epoch} | {name: plain(value) for name, value in (logs or {}).items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(as_json(row) + "\n")


class ProgressBar(Callback):
    """Shows each epoch as a bar with its measures; without a terminal one line an epoch."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._began_at = self._next_at = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._began_at, self._next_at = time.monotonic(), 0.0
        self._epoch = epoch
        self._end_live()  # of an epoch that a job has gone back from
        if self._console.is_terminal or self._console.is_jupyter:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        now = time.monotonic()
        if self._live is None or now < self._next_at:
            return
        self._next_at = now + REDRAW_S
        row = Table.grid(padding=(0, 1))
        done, steps = batch + 1, self.params.get("steps") or 0
        row.add_row(
            self._title(), Bar(steps, done, width=30), f"{done}/{steps}", Text(_shown(logs or {}))
        )
        self._live.update(row, refresh=True)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._end_live()
        seconds = time.monotonic() - self._began_at
        self._console.print(
            Text(f"{self._title()}  {seconds:.1f} s  {_shown(logs or {})}"), soft_wrap=True
        )

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._end_live()

    def _title(self) -> str:
        return f"epoch {self._epoch + 1}/{self.params.get('epochs')}"

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _shown(logs: Mapping[str, Any]) -> str:
    return printable("  ".join(f"{name} {value:.4g}" for name, value in numbers(logs).items()))
