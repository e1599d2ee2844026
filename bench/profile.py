"""Where the time of a worker's step goes, by what worker and ps measure themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.counting import Counting
from bench.options import json_option, lanes_option, list_of, spec_for
from bench.output import headline, report
from bench.training import Training, training_options
from zmqtrain.policies import make_policy

POLICIES = ("hogwild", "bounded-staleness:4", "sync-replicas")
PARTS = {
    "data": "getting the batch",
    "pull": "gathering the parameters",
    "compute": "the loss and its gradients",
    "push": "messages, there and back",
    "wait": "at the ps, behind other workers or held by the policy",
    "apply": "the update on the ps",
}
COLUMNS = (
    *("policy", "lane", "ps", "workers", "steps_per_second", "step_ms"),
    *(f"{part}_ms" for part in PARTS),
)
FORMATS = (".png", ".svg", ".pdf")  # of a plot


def measure(training: Training, policy: str, lane: str) -> dict[str, Any]:
    """Return one row: means over all steps of all workers; the parts add up to ``step_ms``."""
    counting = Counting()
    summary = training.run(counting, lane=lane, policy=policy)
    return {
        "bench": "profile",
        "policy": policy,
        "lane": lane,
        **training.row,
        "steps_per_second": summary.steps_per_second,
        **parts_of(counting),
    }


def parts_of(counting: Counting) -> dict[str, float]:
    """Return the mean step and its parts in milliseconds.

    A worker counts as its wait how long the leader had its push. The update is a part of that.
    """
    phases = ("data", "pull", "compute", "push", "wait")
    parts = {phase: counting.mean("worker", "phase_duration_seconds", phase) for phase in phases}
    applying = min(parts["wait"], counting.mean("ps 0", "apply_duration_seconds"))
    parts |= {"wait": parts["wait"] - applying, "apply": applying}
    return {
        "step_ms": 1e3 * sum(parts.values()),
        **{f"{part}_ms": 1e3 * seconds for part, seconds in parts.items()},
    }


def legend() -> str:
    """Return what the parts are, a line each."""
    return "\n".join(f"{part:<9}{text}" for part, text in PARTS.items())


def _plot_file(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything is measured for it."""
    if path is None:
        return None
    if path.suffix not in FORMATS:
        raise click.BadParameter(f"{path} ends in none of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise click.BadParameter(f"the directory {path.parent} does not exist")
    from bench import plot

    plot.check_installed()
    return path


@click.command("profile")
@click.option(
    "--policy",
    "policies",
    type=list_of(spec_for(make_policy), "spec"),
    default=",".join(POLICIES),
)
@lanes_option
@training_options(job="digits", steps=4000)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_plot_file,
    metavar="FILE.png",
    help="also draw it, with Matplotlib: a bar for each policy and lane",
)
@json_option
def profile_command(
    policies: tuple[str, ...],
    lanes: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Say where the time of one step goes, for each policy and lane.

    Whole processes train, as `zmqtrain run` starts them; the figures are what they tell in their
    metrics. With more processes than cores, every part also holds time spent without a core.

    \b
    Examples:
      python -m bench profile
      python -m bench profile --policy hogwild --workers 4 --plot step.png
      python -m bench profile --job mnist --data DIR --hidden 1000 --plot step.png
    """
    training = Training(**options)
    rows = report(
        (measure(training, policy, lane) for policy in policies for lane in lanes),
        as_json=as_json,
        columns=COLUMNS,
    )
    if not as_json:
        click.echo(legend())
    if plot is not None:
        from bench.plot import draw

        draw(plot, rows, PARTS, headline())
