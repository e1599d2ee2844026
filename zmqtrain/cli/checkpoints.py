"""`zmqtrain checkpoints` lists what a logdir holds; `zmqtrain export` writes weights to a file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.text import Text

from zmqtrain.cli.output import NOTHING, cell, show, show_json, table
from zmqtrain.errors import CheckpointError
from zmqtrain.store.layout import Variable
from zmqtrain.store.logdir import checkpoints, step_of
from zmqtrain.store.manifest import Manifest, read_manifest, verify
from zmqtrain.store.weights import load, no_checkpoint, save
from zmqtrain.units import counted, data_size


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint. ``error`` says what is damaged; ``manifest`` is None if it cannot be read."""

    path: Path
    step: int
    manifest: Manifest | None
    error: str

    @property
    def variables(self) -> list[Variable]:
        return [] if self.manifest is None else self.manifest.variables()

    @property
    def nbytes(self) -> int:
        return 0 if self.manifest is None else sum(file.nbytes for file in self.manifest.files)


@click.command("checkpoints")
@click.argument("logdir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def checkpoints_command(logdir: Path, *, as_json: bool) -> None:
    """Show the checkpoints in LOGDIR, and their variables.

    Newest first; the variables are those of the newest complete one. Every file is
    read and compared with its checksum.

    \b
    Examples:
      zmqtrain checkpoints runs/digits
      zmqtrain checkpoints runs/digits --json
    """
    found = [_look(path) for path in checkpoints(logdir)]
    if not found:
        raise no_checkpoint(logdir)
    if as_json:
        show_json({"logdir": str(logdir), "checkpoints": [_json(one) for one in found]})
    else:
        show(_view(found))


@click.command("export")
@click.argument("logdir", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="which checkpoint [default: the newest]")
@click.option("--average", is_flag=True, help="write the moving averages")
@click.option(
    "--to",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="ends with .safetensors or .npz",
)
def export_command(logdir: Path, *, step: int | None, average: bool, to: Path) -> None:
    """Write the weights of a checkpoint in LOGDIR into a file.

    The file holds all variables by name.

    \b
    Examples:
      zmqtrain export runs/digits --to digits.safetensors
      zmqtrain export runs/digits --step 1200 --average --to digits.npz
    """
    weights = load(logdir, step=step, average=average)
    save(to, weights)
    click.echo(f"{to}: {counted(len(weights), 'variable')}")


def _look(path: Path) -> Found:
    manifest = None
    try:
        manifest = read_manifest(path)
        verify(path, manifest)
    except CheckpointError as error:
        return Found(path, step_of(path), manifest, str(error))
    return Found(path, step_of(path), manifest, "")


def _json(one: Found) -> dict[str, object]:
    manifest = one.manifest
    return {
        "step": one.step,
        "path": str(one.path),
        "complete": not one.error,
        "error": one.error,
        "created": manifest and manifest.created.isoformat(),
        "generation": manifest and manifest.generation,
        "policy": manifest and manifest.policy,
        "nbytes": one.nbytes,
        "variables": [asdict(variable) for variable in one.variables],
    }


def _view(found: list[Found]) -> RenderableType:
    rows = table("step", "saved", "size", "policy", "", right=("step", "size"), folded=("",))
    for one in found:
        manifest = one.manifest
        rows.add_row(
            cell(one.step),
            cell(_local(manifest.created) if manifest else NOTHING),
            cell(data_size(one.nbytes) if manifest else NOTHING),
            cell(manifest.policy if manifest else NOTHING),
            cell(f"damaged: {one.error}" if one.error else "complete"),
        )
    complete = next((one for one in found if not one.error), None)
    if complete is None:
        return rows
    variables = table("variable", "shape", "dtype", "kind", folded=("variable",))
    for variable in complete.variables:
        shape = " x ".join(map(str, variable.shape)) or "scalar"
        variables.add_row(*map(cell, (variable.name, shape, variable.dtype, variable.kind)))
    return Group(rows, Text(), variables)


def _local(time: datetime) -> str:
    return time.astimezone().isoformat(" ", "seconds")
