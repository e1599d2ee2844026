"""`zmqtrain placement`: which variable of a job is on which ps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zmqtrain.cli.output import NOTHING, cell, show, show_json, table
from zmqtrain.config.job_file import load_job
from zmqtrain.config.options import option_of
from zmqtrain.job import Job
from zmqtrain.store.layout import ShardLayout, Slice, Variable
from zmqtrain.units import data_size


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each variable is; the variables are in the model's creation order."""

    variables: tuple[Variable, ...]
    layouts: tuple[ShardLayout, ...]
    device: str = "cpu"

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts)

    @property
    def balance(self) -> float:
        """The largest shard over the mean: 1 is perfect, the number of ps is the worst."""
        return max(layout.nbytes for layout in self.layouts) / (self.nbytes / len(self.layouts))

    def slices(self) -> list[tuple[Slice, int]]:
        """Return every slice and the ps that holds it, in the order of variables and rows."""
        order = {variable.name: number for number, variable in enumerate(self.variables)}
        held = [(cut, layout.shard) for layout in self.layouts for cut in layout.slices]
        return sorted(held, key=lambda item: (order[item[0].variable.name], item[0].start))


@click.command("placement")
@click.argument("job")
@click.option(
    "--ps",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="number of ps that share the parameters",
)
@option_of(Job, "placement", optional=True)
@option_of(Job, "partition_nbytes", optional=True)
@option_of(Job, "ps_device", optional=True)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def placement_command(job: str, ps: int, *, as_json: bool, **flags: Any) -> None:
    """Show which variable of JOB is on which ps.

    If a variable is cut, it shows the rows of each part. JOB is file.py, file.py:name or
    package.module:name. Nothing is started; every task of the cluster computes this placement.

    \b
    Examples:
      zmqtrain placement examples/digits.py --ps 2
      zmqtrain placement job.py --ps 4 --placement round-robin --partition-nbytes 0
    """
    loaded = load_job(job).with_overrides(**flags)
    placement = Placement(loaded.variables(), loaded.layouts(ps), loaded.ps_device)
    if as_json:
        how = {"placement": loaded.placement, "partition_nbytes": loaded.partition_nbytes}
        show_json({"job": job, **how, **placement_json(placement)})
    else:
        show(placement_view(placement))


def placement_view(placement: Placement) -> RenderableType:
    """Return slices, totals of each ps and the balance for a person."""
    return Group(
        _slices(placement), Text(), _totals(placement), Text(), cell(_conclusion(placement))
    )


def placement_json(placement: Placement) -> dict[str, object]:
    """Return slices, totals of each ps and the balance for a script."""
    return {
        "slices": [
            {
                "variable": cut.variable.name,
                "shape": cut.variable.shape,
                "start": cut.start,
                "rows": cut.rows,
                "ps": shard,
                "device": placement.device,
                "nbytes": cut.nbytes,
            }
            for cut, shard in placement.slices()
        ],
        "ps": [
            {"ps": layout.shard, "slices": len(layout.slices), "nbytes": layout.nbytes}
            for layout in placement.layouts
        ],
        "nbytes": placement.nbytes,
        "balance": placement.balance,
    }


def _slices(placement: Placement) -> Table:
    result = table(
        "variable",
        "shape",
        "rows",
        "ps",
        "device",
        "size",
        right=("ps", "size"),
        folded=("variable",),
    )
    for cut, shard in placement.slices():
        shape = " x ".join(map(str, cut.variable.shape)) or "scalar"
        where = shard, placement.device, data_size(cut.nbytes)
        result.add_row(*map(cell, (cut.variable.name, shape, _rows(cut), *where)))
    return result


def _totals(placement: Placement) -> Table:
    result = table("ps", "slices", "size", "share", right=("ps", "slices", "size", "share"))
    for layout in placement.layouts:
        share = f"{100 * layout.nbytes / placement.nbytes:.1f} %"
        size = data_size(layout.nbytes)
        result.add_row(*map(cell, (layout.shard, len(layout.slices), size, share)))
    return result


def _conclusion(placement: Placement) -> str:
    size, balance = data_size(placement.nbytes), f"{placement.balance:.2f}"
    text = f"{size} of parameters; the largest part is {balance} times the mean"
    if empty := [f"ps {layout.shard}" for layout in placement.layouts if not layout.slices]:
        verb = "holds" if len(empty) == 1 else "hold"
        text += (
            f"; {', '.join(empty)} {verb} nothing: use fewer ps, or a smaller --partition-nbytes"
        )
    return text


def _rows(cut: Slice) -> str:
    """Return the rows of its variable that a slice holds, first..last."""
    if not cut.variable.shape:
        return NOTHING
    if cut.rows == cut.variable.shape[0]:
        return "all"
    return f"{cut.start}..{cut.start + cut.rows - 1}"
