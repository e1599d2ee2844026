"""Draws profiles of a step with Matplotlib, which the extra ``bench`` installs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.workload import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From the palette of Okabe and Ito, which people with any colour vision can tell apart; with each
# the colour of text on it.
COLOURS = (
    ("#9A9A9A", "black"),
    ("#56B4E9", "black"),
    ("#0072B2", "white"),
    ("#E69F00", "black"),
    ("#F0E442", "black"),
    ("#D55E00", "white"),
)
INK, QUIET, GRID = "#1F1F1F", "#6B6B6B", "#DDDDDD"

CLEAR: dict[str, Any] = {
    "facecolor": "white",
    "edgecolor": "none",
    "pad": 1.5,
}  # the grid behind a text

WIDTH_IN, BAR_IN = 10.0, 0.48
ABOVE_IN, BELOW_IN = 1.4, 0.85  # the bars: title and legend; axis and what was measured
MARGIN_IN = 0.25
LEFT, RIGHT = 0.065, 0.985  # of the width: where the axis begins and ends
GAP = 0.8  # between the bars of two policies, in bars; the policy's name stands there
ROOM = 1.25  # length of the axis by the longest bar: the rest is for the text behind it
NARROWEST = 0.045  # part of the axis that a bar's figure needs
DPI = 160


def check_installed() -> None:
    """Find out before anything is measured whether it can be drawn.

    Raises:
        ClickException: Matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise click.ClickException(
            "--plot needs Matplotlib: pip install 'zmqtrain[bench]'"
        ) from None


def draw(path: Path, rows: Sequence[Row], parts: Mapping[str, str], machine: str) -> None:
    """Write a file with a bar for each row, made of the ``{part}_ms`` of its parts.

    ``parts`` are names and meanings, as many as there are colours at most; ``machine`` is written
    below. The ending of the file's name says its format.
    """
    from matplotlib.figure import Figure

    places = _places(rows)
    height_in = ABOVE_IN + BELOW_IN + BAR_IN * (places[-1] + GAP + 1)
    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor="white")
    bottom, top = BELOW_IN / height_in, 1 - ABOVE_IN / height_in
    axes = figure.add_axes((LEFT, bottom, RIGHT - LEFT, top - bottom))
    _bars(axes, places, rows, parts)
    _frame(axes, places, rows)

    def write(text: str, below_in: float, **style: Any) -> None:
        figure.text(MARGIN_IN / WIDTH_IN, 1 - below_in / height_in, text, va="top", **style)

    write("Where the time of a worker's step goes", 0.2, fontsize=14, weight="bold", color=INK)
    write(_subject(rows[0]), 0.5, fontsize=9.5, color=QUIET)
    write(machine, height_in - 0.28, fontsize=8, color=QUIET)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="upper left",
        bbox_to_anchor=((MARGIN_IN - 0.08) / WIDTH_IN, 1 - 0.7 / height_in),
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=3.0,
    )
    figure.savefig(path, dpi=DPI)


def _places(rows: Sequence[Row]) -> list[float]:
    """Return where each bar is, counted in bars from the top; a new policy is set apart."""
    steps = [1 + GAP * (row["policy"] != before["policy"]) for before, row in pairwise(rows)]
    return list(accumulate(steps, initial=0.0))


def _bars(
    axes: Axes, places: Sequence[float], rows: Sequence[Row], parts: Mapping[str, str]
) -> None:
    axis_ms = ROOM * max(row["step_ms"] for row in rows)
    axes.set_xlim(0, axis_ms)
    begun = [0.0] * len(rows)
    for (part, meaning), (colour, text_colour) in zip(parts.items(), COLOURS, strict=False):
        lengths = [row[f"{part}_ms"] for row in rows]
        bars = axes.barh(
            places,
            lengths,
            left=begun,
            height=0.78,
            color=colour,
            edgecolor="white",
            linewidth=0.8,
            label=f"{part}: {meaning}",
        )
        labels = [_figure(ms) if ms > NARROWEST * axis_ms else "" for ms in lengths]
        axes.bar_label(bars, labels, label_type="center", fontsize=8.5, color=text_colour)
        begun = [start + length for start, length in zip(begun, lengths, strict=True)]


def _frame(axes: Axes, places: Sequence[float], rows: Sequence[Row]) -> None:
    """Write what the bars are and come to, and draw the axis."""
    for place, row in zip(places, rows, strict=True):
        axes.annotate(
            f"{_figure(row['step_ms'], 3)} ms, {row['steps_per_second']:,.0f} steps/s",
            (row["step_ms"], place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
            bbox=CLEAR,
        )
    for place, before, row in zip(places, [None, *rows], rows, strict=False):
        if before is None or before["policy"] != row["policy"]:
            axes.annotate(
                row["policy"],
                (0, place - 0.5),
                va="bottom",
                fontsize=9.5,
                weight="bold",
                color=INK,
                bbox=CLEAR,
            )
    axes.set_ylim(places[-1] + 0.6, -0.4 - GAP)
    axes.set_yticks(places, [row["lane"] for row in rows], fontsize=9.5)
    axes.set_xlabel("milliseconds, mean over all steps of all workers", fontsize=9, color=QUIET)
    axes.tick_params(axis="x", labelsize=8.5, color=GRID, labelcolor=QUIET)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _figure(ms: float, digits: int = 2) -> str:
    """Return so many significant digits, and all of those before the point."""
    return f"{ms:#.{digits}g}".rstrip(".") if ms < 10**digits else f"{ms:.0f}"


def _subject(row: Row) -> str:
    model = f"{row['hidden']} hidden units" if row["hidden"] else "a linear model"
    workers = "1 worker" if row["workers"] == 1 else f"{row['workers']} workers"
    return (
        f"{row['job']}, {model}, batches of {row['batch_size']}, {row['rule']}; "
        f"{row['ps']} ps, {workers}"
    )
