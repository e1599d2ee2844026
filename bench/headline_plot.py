"""Draws a run that was disturbed: loss, staleness and progress, with every kill and policy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from bench.plot import DPI, INK, QUIET, tidy
from zmqtrain.local.chaos import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bench.headline import Sample

KILLS = {"ps": "#D55E00", "worker": "#0072B2", "chief": "#1F1F1F"}
SHADES = ("#F4F4F4", "#E4EEF6", "#FBF1DC")  # behind each policy


def draw(path: Path, samples: Sequence[Sample], chaos: Report, began: float, machine: str) -> None:
    """Write the picture; the ending of its name says its format."""
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
