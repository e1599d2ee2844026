"""`zmqtrain placement`: which variable of a job is on which ps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from zmqtrain.cli.output import cell, shape_of, show_result, table
from zmqtrain.config.commands import command
from zmqtrain.config.job_file import load_job
from zmqtrain.config.options import option_of
from zmqtrain.job import Job
from zmqtrain.planning.plan import plan_for
from zmqtrain.planning.strategy import spread_cluster
from zmqtrain.store.layout import ShardLayout, Variable
from zmqtrain.units import NOTHING, data_size


@command("placement")
@click.argument("job")
@click.option(
    "--ps",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="number of ps that share the parameters; 0: the workers do",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="number of workers; without ps each hosts one",
)
@option_of(Job, "placement", optional=True)
@option_of(Job, "partition_nbytes", optional=True)
@option_of(Job, "ps_device", optional=True)
@option_of(Job, "copies", optional=True)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def placement_command(job: str, ps: int, workers: int, *, as_json: bool, **flags: Any) -> None:
    """Show which variable of JOB is on which ps.

    For a variable that is cut, the rows of each part are shown. JOB is file.py, file.py:name or
    package.module:name. Nothing is started; every task of the cluster computes this placement.

    \b
    Examples:
      zmqtrain placement examples/digits.py --ps 2
      zmqtrain placement job.py --ps 4 --placement round-robin --partition-nbytes 0
      zmqtrain placement job.py --ps 0 --workers 3
    """
    loaded = load_job(job, **flags)
    plan = plan_for(loaded, spread_cluster(ps, workers))
    how = {"placement": plan.job.placement, "partition_nbytes": plan.job.partition_nbytes}
    placed = described(loaded.variables(), plan.layouts, loaded.ps_device)
    show_result({"job": job, **how, **placed}, placement_view(placed), as_json=as_json)


def described(
    variables: Sequence[Variable], layouts: Sequence[ShardLayout], device: str = "cpu"
) -> dict[str, Any]:
    """Return slices in the order of variables and rows, what each ps holds, and the balance.

    The balance is the largest shard over the mean: 1 is perfect, the number of ps is the worst.
    """
    order = {variable.name: number for number, variable in enumerate(variables)}
    slices = [
        {
            "variable": cut.variable.name,
            "shape": cut.variable.shape,
            "start": cut.start,
            "rows": cut.rows,
            "ps": layout.shard,
            "device": device,
            "nbytes": cut.nbytes,
        }
        for layout in layouts
        for cut in layout.slices
    ]
    sizes = [layout.nbytes for layout in layouts]
    return {
        "slices": sorted(slices, key=lambda cut: (order[cut["variable"]], cut["start"])),
        "ps": [
            {"ps": layout.shard, "slices": len(layout.slices), "nbytes": layout.nbytes}
            for layout in layouts
        ],
        "nbytes": sum(sizes),
        "balance": max(sizes) * len(sizes) / sum(sizes),
    }


def placement_view(placed: Mapping[str, Any]) -> RenderableType:
    """Return slices, totals of each ps and the balance for a person."""
    slices, totals = [], []
    for cut in placed["slices"]:
        where = cut["ps"], cut["device"], data_size(cut["nbytes"])
        slices.append((cut["variable"], shape_of(cut["shape"]), _rows(cut), *where))
    for each in placed["ps"]:
        share = f"{100 * each['nbytes'] / placed['nbytes']:.1f} %"
        totals.append((each["ps"], each["slices"], data_size(each["nbytes"]), share))
    names = ("variable", "shape", "rows", "ps", "device", "size")
    of_ps = ("ps", "slices", "size", "share")
    return Group(
        table(*names, rows=slices, right=("ps", "size"), folded=("variable",)),
        Text(),
        table(*of_ps, rows=totals, right=of_ps),
        Text(),
        cell(_conclusion(placed)),
    )


def _conclusion(placed: Mapping[str, Any]) -> str:
    size, balance = data_size(placed["nbytes"]), f"{placed['balance']:.2f}"
    text = f"{size} of parameters; the largest part is {balance} times the mean"
    if empty := [f"ps {each['ps']}" for each in placed["ps"] if not each["slices"]]:
        verb = "holds" if len(empty) == 1 else "hold"
        text += (
            f"; {', '.join(empty)} {verb} nothing: use fewer ps, or a smaller --partition-nbytes"
        )
    return text


def _rows(cut: Mapping[str, Any]) -> str:
    """Return the rows of its variable that a slice holds, first..last."""
    if not cut["shape"]:
        return NOTHING
    if cut["rows"] == cut["shape"][0]:
        return "all"
    return f"{cut['start']}..{cut['start'] + cut['rows'] - 1}"
