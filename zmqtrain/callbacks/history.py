"""The measures of each epoch of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain.hints import imported
from zmqtrain.metrics import numbers


class _Measures(dict[str, list[Any]]):
    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"{name!r} was not measured; there are {', '.join(self) or 'none'}; what a step of a "
            "model can measure is in docs/fit.md"
        )


class History:
    """The measures of each epoch, as Keras's ``fit`` returns them.

    ``epoch``: the epochs, from 0. ``history``: for each measure its values, one an epoch.
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = _Measures()
        self.params: Mapping[str, Any] = {}

    def add(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Append the measures of one epoch; missing ones are NaN."""
        for name in logs:
            self.history.setdefault(name, [float("nan")] * len(self.epoch))
        self.epoch.append(epoch)
        for name, values in self.history.items():
            values.append(logs.get(name, float("nan")))

    def rows(self) -> list[dict[str, Any]]:
        """Return the measures of each epoch as plain data, ``epoch`` first."""
        return [
            {"epoch": epoch} | {name: plain(values[i]) for name, values in self.history.items()}
            for i, epoch in enumerate(self.epoch)
        ]

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> History:
        """Return the history of such rows."""
        history = cls()
        for row in rows:
            history.add(row["epoch"], {name: row[name] for name in row if name != "epoch"})
        return history

    def plot(self, path: str | Path) -> None:
        """Draw the learning curves into a picture: training and validation of a measure together.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        rows = [numbers(row) for row in self.rows()]
        curves = [name for name in self.history if any(name in row for row in rows)]
        kinds = list(dict.fromkeys(name.removeprefix("val_") for name in curves))
        figure = imported("matplotlib.figure", "plot").Figure(
            figsize=(6, 3 * max(1, len(kinds))), layout="constrained"
        )
        for place, kind in enumerate(kinds, 1):
            axes = figure.add_subplot(len(kinds), 1, place)
            for name, label in ((kind, "training"), (f"val_{kind}", "validation")):
                if name in curves:
                    values = [row.get(name, np.nan) for row in rows]
                    axes.plot([epoch + 1 for epoch in self.epoch], values, "o-", label=label)
            axes.set(xlabel="epoch", ylabel=kind)
            axes.legend()
        figure.savefig(str(path))

    def __repr__(self) -> str:
        return f"History({len(self.epoch)} epochs of {', '.join(self.history) or 'nothing'})"


def plain(value: Any) -> Any:
    """Return a measure as a number, or nested lists of numbers; anything else as a text."""
    try:
        return None if value is None else np.asarray(value, np.float64).tolist()
    except (TypeError, ValueError):
        return str(value)
