"""`zmqtrain clean`: what dead tasks left on this host."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.text import Text

from zmqtrain.cli.output import cell, show_result, table
from zmqtrain.config.commands import command
from zmqtrain.config.options import names_of, option_of
from zmqtrain.config.run_file import old_notes
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ConfigError
from zmqtrain.local.run_directories import remove_run, run_directories
from zmqtrain.store.segment_files import default_directory, remove_dead, segment_files
from zmqtrain.units import data_size, duration


@dataclass(frozen=True, slots=True)
class Found:
    """A segment, a run directory or a note of a job's end on this host."""

    what: str  # "segment", "run" for the directory of a zmqtrain run, or "note"
    path: Path
    nbytes: int
    age_s: float
    ps: str  # "alive", "dead", or "dead, workers wait"
    removed: bool


@command("clean")
@option_of(
    TaskConfig,
    "segment_dir",
    help="where to look for segments, if the job had this option (default: the user's directory in "
    "/dev/shm)",
)
@click.option("--dry-run", is_flag=True, help="remove nothing")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def clean_command(*, segment_dir: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove what killed tasks left on this host.

    A killed ps leaves its segment: a file that takes up main memory until it is removed. A killed
    zmqtrain run leaves a directory with sockets; a lost task on Ray leaves one with its keys and
    its log.
    The command lists but keeps what belongs to a live ps, or to workers that wait for a dead one.

    A restarted ps goes on from its segment. This host cannot see workers of other hosts, so clean
    up when their job has ended.

    \b
    Examples:
      zmqtrain clean --dry-run              # list only
      zmqtrain clean
      zmqtrain clean --segment-dir /mnt/huge/zmqtrain
      zmqtrain clean --json | jq .freed_nbytes
    """
    found = list(clean(_directory(segment_dir), Path(tempfile.gettempdir()), dry_run=dry_run))
    show_result(clean_json(found), clean_view(found), as_json=as_json)


def clean(segments: Path | None, temporary: Path, *, dry_run: bool) -> Iterator[Found]:
    """Yield every segment, run directory and old note; remove those that are not in use."""
    for segment in segment_files(segments) if segments is not None else ():
        removed = not (dry_run or segment.owned) and remove_dead(segment.path)
        ps = "alive" if segment.owned else "dead, workers wait" if segment.held else "dead"
        age_s = _age_s(segment.modified_at)
        yield Found("segment", segment.path, segment.nbytes, age_s, ps, removed)
    for run in run_directories(temporary):
        removed = not (dry_run or run.in_use) and remove_run(run.path)
        ps = "alive" if run.in_use else "dead"
        yield Found("run", run.path, run.nbytes, _age_s(run.modified_at), ps, removed)
    for note in old_notes():
        known = note.stat()
        if not dry_run:
            note.unlink(missing_ok=True)
        yield Found("note", note, known.st_size, _age_s(known.st_mtime), "dead", not dry_run)


def clean_view(found: Sequence[Found]) -> RenderableType:
    if not found:
        return cell("nothing to remove, and no ps of this user runs on this host")
    headings = ("what", "path", "size", "age", "ps", "done")
    rows = table(*headings, rows=map(_row, found), right=("size",), folded=("path",))
    return Group(rows, Text(), cell(_conclusion(found)))


def clean_json(found: Sequence[Found]) -> dict[str, object]:
    return {
        "found": [asdict(one) | {"path": str(one.path)} for one in found],
        "removed": sum(one.removed for one in found),
        "freed_nbytes": sum(one.nbytes for one in found if one.removed),
    }


def _row(one: Found) -> tuple[object, ...]:
    done = "removed" if one.removed else "kept"
    return one.what, one.path, data_size(one.nbytes), duration(one.age_s), one.ps, done


def _conclusion(found: Sequence[Found]) -> str:
    sizes: dict[str, list[int]] = {"removed": [], "left over": [], "in use": []}
    for one in found:
        kept = "left over" if one.ps == "dead" else "in use"
        sizes["removed" if one.removed else kept].append(one.nbytes)
    parts = [(len(each), name, data_size(sum(each))) for name, each in sizes.items() if each]
    return "; ".join(f"{count} {name}, {size}" for count, name, size in parts)


def _directory(segment_dir: str | None) -> Path | None:
    """Return where to look for segments; None if this host has no default directory for them."""
    if segment_dir is None:
        return default_directory()
    if not (os.path.isdir(segment_dir) and os.access(segment_dir, os.R_OK | os.X_OK)):
        raise ConfigError(
            f"{names_of('segment_dir')} is {segment_dir!r}; expected a directory that this user "
            "can read, the same as for the ps; correct or omit it"
        )
    return Path(segment_dir)


def _age_s(modified_at: float) -> float:
    return max(0.0, time.time() - modified_at)
