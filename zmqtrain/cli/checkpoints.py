"""Commands that read a logdir: what it holds, its weights as a file, a page of the run.

They are `zmqtrain checkpoints`, `zmqtrain export` and `zmqtrain report`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from zmqtrain.chief.run_record import RECORD_FILE, read_record
from zmqtrain.cli.ended import with_ending
from zmqtrain.cli.output import say, shape_of, show_result, table, write_named
from zmqtrain.config.commands import command
from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.observe.page import report
from zmqtrain.store.array_files import RowDtype, check_table_file, write_table
from zmqtrain.store.checkpoint import read_parameters
from zmqtrain.store.logdir import checkpoints, step_of
from zmqtrain.store.manifest import read_manifest, verify
from zmqtrain.store.weights import checkpoint_at, no_checkpoint, save, table_at
from zmqtrain.units import NOTHING, counted, data_size


@command("checkpoints")
@click.argument("logdir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def checkpoints_command(logdir: Path, *, as_json: bool) -> None:
    """Show the checkpoints in LOGDIR, and their variables.

    The newest comes first; the variables are those of the newest complete one. Every file is read
    and compared with its checksum.

    \b
    Examples:
      zmqtrain checkpoints runs/digits
      zmqtrain checkpoints runs/digits --json
    """
    found = [_described(path) for path in checkpoints(logdir)]
    if not found:
        raise no_checkpoint(logdir)
    show_result({"logdir": str(logdir), "checkpoints": found}, _view(found), as_json=as_json)


@command("export")
@click.argument("logdir", type=click.Path(path_type=Path))
@click.option(
    "--step", type=click.IntRange(min=0), help="step of the checkpoint (default: the newest)"
)
@click.option("--average", is_flag=True, help="write the moving averages")
@click.option(
    "--to",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="the file to write, .safetensors or .npz; for a table also .parquet",
)
@click.option("--table", "name", metavar="NAME", help="write the trained rows of this table")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), help="type of the table's rows")
@click.option(
    "--max-rows",
    type=click.IntRange(min=1),
    help="write at most this many rows, those trained last",
)
@click.option(
    "--since", type=click.IntRange(min=0), help="write the rows that changed since that step"
)
def export_command(
    logdir: Path,
    *,
    step: int | None,
    average: bool,
    to: Path,
    name: str | None,
    dtype: RowDtype | None,
    max_rows: int | None,
    since: int | None,
) -> None:
    """Write the weights of a checkpoint in LOGDIR into a file.

    The file holds all variables by name, without tables, or the rows of one table: "ids", "rows"
    and "step". With --since, the checkpoint of that step must still be there (0 is the start of
    the job), and "forgotten" has the ids whose rows are no longer kept.

    \b
    Examples:
      zmqtrain export runs/digits --to digits.safetensors
      zmqtrain export runs/digits --step 1200 --average --to digits.npz
      zmqtrain export runs/likes --table user.weight --to user.parquet --dtype float16
      zmqtrain export runs/likes --table user.weight --since 1200 --to changes.npz
    """
    if name is None:
        options = {"--dtype": dtype, "--max-rows": max_rows, "--since": since}
        if given := [option for option, value in options.items() if value is not None]:
            raise click.UsageError(f"{', '.join(given)}: expected --table NAME, too")
        path, manifest = checkpoint_at(logdir, step)
        weights = read_parameters(path, manifest, average=average)
        save(to, weights)
        tables = manifest.tables
        rest = f"; tables are left out, see --table: {', '.join(tables)}" if tables else ""
        say(f"{to}: {counted(len(weights), 'variable')}{rest}")
        return
    if average:
        raise click.UsageError("--average: tables have no moving averages; leave it out")
    check_table_file(to)
    export = table_at(logdir, name, step=step, since=since, most=max_rows)
    write_table(to, replace(export, dtype=dtype or "float32"))
    forgotten = "" if export.forgotten is None else f", {len(export.forgotten)} forgotten"
    say(f"{to}: {counted(len(export.rows.ids), 'row')} at step {export.step}{forgotten}")


@command("report")
@click.argument("logdir", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--html",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default="run.html",
    show_default=True,
    help="the file to write",
)
def report_command(*, logdir: Path, path: Path) -> None:
    """Write a page of the run in LOGDIR: its curves, and what happened.

    The page is one file that needs no network. It can also be made of a run that failed or was
    killed. While a job runs, its chief serves the same page at its metrics address.

    \b
    Examples:
      zmqtrain report runs/net
      zmqtrain report runs/net --html net.html
    """
    record = read_record(logdir)
    if record is None:
        raise ConfigError(
            f"{logdir} has no {RECORD_FILE}; expected the logdir of a job that has trained for "
            "some seconds"
        )
    write_named(path, report(with_ending(record, str(logdir))))
    say(f"{path} is written; open it in a browser")


def _described(path: Path) -> dict[str, Any]:
    """Return a checkpoint for a script; ``error`` describes its damage."""
    manifest, error = None, ""
    try:
        manifest = read_manifest(path)
        verify(path, manifest)
    except CheckpointError as damage:
        error = str(damage)
    return {
        "step": step_of(path),
        "path": str(path),
        "complete": not error,
        "error": error,
        "created": manifest and manifest.created.isoformat(),
        "generation": manifest and manifest.generation,
        "policy": manifest and manifest.policy,
        "nbytes": sum(file.nbytes for file in manifest.files) if manifest else 0,
        "variables": [asdict(each) for each in manifest.variables()] if manifest else [],
    }


def _view(found: list[dict[str, Any]]) -> RenderableType:
    headings = ("step", "saved", "size", "policy", "")
    rows = table(*headings, rows=map(_row, found), right=("step", "size"), folded=("",))
    complete = next((one for one in found if one["complete"]), None)
    if complete is None:
        return rows
    variables = [
        (each["name"], shape_of(each["shape"]), each["dtype"], each["kind"])
        for each in complete["variables"]
    ]
    names = ("variable", "shape", "dtype", "kind")
    return Group(rows, Text(), table(*names, rows=variables, folded=("variable",)))


def _row(one: Mapping[str, Any]) -> tuple[object, ...]:
    state = f"damaged: {one['error']}" if one["error"] else "complete"
    if one["created"] is None:  # its manifest cannot be read
        return one["step"], NOTHING, NOTHING, NOTHING, state
    saved = datetime.fromisoformat(one["created"]).astimezone().isoformat(" ", "seconds")
    return one["step"], saved, data_size(one["nbytes"]), one["policy"], state
