"""Draws pictures with Matplotlib, which the extra ``bench`` installs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from bench.workload import Row
from zmqtrain.local.chaos import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# From the palette of Okabe and Ito, which people with any colour vision can tell apart.
COLOURS = ("#9A9A9A", "#56B4E9", "#0072B2", "#E69F00", "#F0E442", "#D55E00")
CURVES = ("#8C8C8C", "#E69F00", "#D55E00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7")
INK, QUIET, GRID = "#1F1F1F", "#6B6B6B", "#DDDDDD"
KILLS = {"ps": "#D55E00", "worker": "#0072B2", "chief": "#1F1F1F"}
SHADES = ("#F4F4F4", "#E4EEF6", "#FBF1DC")  # behind each policy
ROOM = 1.25  # length of the axis by the longest bar: the rest is for the text behind it
DPI = 150
FORMATS = (".png", ".svg", ".pdf")


def writable(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse, before anything is measured for it, a picture that cannot be drawn.

    Raises:
        ClickException: the name or the directory is wrong, or Matplotlib is not installed.
    """
    if path is None:
        return None
    if path.suffix not in FORMATS or not path.parent.is_dir():
        raise click.BadParameter(
            f"{path}: expected a name that ends in {', '.join(FORMATS)}, in a directory that exists"
        )
    if find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs Matplotlib: pip install 'zmqtrain[bench]'")
    return path


plot_option = click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=writable,
    metavar="FILE.png",
    help="also draw it, with Matplotlib",
)


def draw_profile(path: Path, rows: Sequence[Row], parts: Mapping[str, str], machine: str) -> None:
    """Write a file with a bar for each row, made of the ``{part}_ms`` of its parts.

    ``parts``: names and meanings, at most one for each colour; ``machine`` is written below. The
    ending of the file's name decides its format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.7 + 0.5 * len(rows)), facecolor="white", layout="constrained")
    axes, places, begun = figure.add_subplot(), range(len(rows)), [0.0] * len(rows)
    for (part, meaning), colour in zip(parts.items(), COLOURS, strict=False):
        lengths = [row[f"{part}_ms"] for row in rows]
        bars = axes.barh(places, lengths, left=begun, color=colour, label=f"{part}: {meaning}")
        begun = [start + length for start, length in zip(begun, lengths, strict=True)]
    texts = [f"{row['step_ms']:.3g} ms, {row['steps_per_second']:,.0f} steps/s" for row in rows]
    axes.bar_label(bars, texts, padding=6, fontsize=9, color=INK)
    axes.set_xlim(0, ROOM * max(begun))
    axes.set_yticks(places, [f"{row['policy']}, {row['lane']}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds, mean over all steps of all workers\n{machine}", color=QUIET)
    tidy(axes, grid="x")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(f"Where the time of a worker's step goes\n{_subject(rows[0])}", color=INK)
    figure.savefig(path, dpi=DPI)


@dataclass(frozen=True, slots=True)
class Sample:
    """The status of the job at one moment."""

    at_s: float
    step: int
    loss: float
    staleness: float
    policy: str


def draw_headline(
    path: Path, samples: Sequence[Sample], chaos: Report, began: float, machine: str
) -> None:
    """Draw loss, staleness and progress of a disturbed run, with every kill and policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.2), facecolor="white", layout="constrained")
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 2))
    times = [sample.at_s for sample in samples]
    series = (
        ("loss of the last push", [sample.loss for sample in samples]),
        ("mean staleness", [sample.staleness for sample in samples]),
        ("global step", [sample.step for sample in samples]),
    )
    for axes, (name, values) in zip(panels, series, strict=True):
        axes.plot(times, values, color=INK, linewidth=1.1)
        axes.set_ylabel(name, fontsize=9, color=QUIET)
        tidy(axes, grid="y")
        _mark_policies(axes, samples, with_names=axes is panels[0])
        _mark_kills(axes, chaos, began, with_names=axes is panels[0])
    panels[0].set_yscale("log")
    panels[-1].set_xlabel(f"seconds\n{machine}", fontsize=9, color=QUIET)
    figure.suptitle(f"Training goes on: {len(chaos.done)} kills, seed {chaos.seed}", color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=DPI)


def draw_curves(
    path: Path, rows: Sequence[Row], title: str, machine: str, *, is_dark: bool
) -> None:
    """Draw ``curve`` of each row, seconds and losses, under its ``label``; one seed is drawn bold.

    ``is_dark``: for a dark page.
    """
    from matplotlib.figure import Figure

    ink, ground = (GRID, "#0D1117") if is_dark else (INK, "white")
    colours = dict(zip(dict.fromkeys(row["label"] for row in rows), cycle(CURVES), strict=False))
    figure = Figure(figsize=(9, 5), facecolor=ground, layout="constrained")
    axes = figure.add_subplot(facecolor=ground)
    for row in rows:
        is_first = row["seed"] == rows[0]["seed"]
        look = {"linewidth": 1.8, "label": row["label"]} if is_first else {"linewidth": 0.6}
        axes.plot(*row["curve"], color=colours[row["label"]], marker=".", **look)
    tidy(axes)
    if is_dark:
        axes.grid(color="#30363D", linewidth=0.6)
    axes.set_xlabel(f"seconds\n{machine}", fontsize=9, color=QUIET)
    axes.set_ylabel("loss on held-out text", fontsize=9, color=QUIET)
    figure.suptitle(title, color=ink)
    legend = figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_color(ink)
    figure.savefig(path, dpi=DPI)


def _mark_policies(axes: Axes, samples: Sequence[Sample], *, with_names: bool) -> None:
    spans = [(policy, list(part)) for policy, part in groupby(samples, lambda s: s.policy)]
    for place, (policy, part) in enumerate(spans):
        end = spans[place + 1][1][0].at_s if place + 1 < len(spans) else part[-1].at_s
        axes.axvspan(part[0].at_s, end, color=SHADES[place % len(SHADES)], linewidth=0, zorder=0)
        if with_names:
            name = axes.text(part[0].at_s, 1.02, f" {policy}", fontsize=8.5, color=QUIET)
            name.set_transform(axes.get_xaxis_transform())


def _mark_kills(axes: Axes, chaos: Report, began: float, *, with_names: bool) -> None:
    for role, colour in KILLS.items():
        times = [done.at - began for done in chaos.done if done.act.role == role]
        for place, at_s in enumerate(times):
            label = f"{role} killed" if with_names and not place else None
            axes.axvline(at_s, color=colour, linewidth=1.0, alpha=0.8, label=label)


def tidy(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Draw nothing but the data and a light grid."""
    axes.tick_params(labelsize=8, colors=QUIET)
    axes.grid(axis=grid, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _subject(row: Row) -> str:
    model = f"{row['hidden']} hidden units" if row["hidden"] else "a linear model"
    return (
        f"{row['job']}, {model}, batches of {row['batch_size']}, {row['rule']}; "
        f"{row['ps']} ps, {row['workers']} workers"
    )
