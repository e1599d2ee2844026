"""Output of benchmarks: JSON lines for scripts; tables with machine and commit for people."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from bench.workload import Row

ROOT = Path(__file__).parent.parent
FILE_WIDTH = 140  # of a table that goes to no terminal
CPU_INFO = Path("/proc/cpuinfo")  # Linux only


def report(rows: Iterable[Row], *, as_json: bool, columns: Sequence[str] = ()) -> list[Row]:
    """Print results, each as soon as it is there: as JSON, or on a terminal in a table that grows.

    A table has the columns ``columns``, or all keys of the first row. Returns the results.
    """
    if as_json:
        return [_told(row) for row in rows]
    machine, collected = headline(), list[Row]()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    with Live(console=console, auto_refresh=False) as live:
        for row in rows:
            collected.append(row)
            live.update(page(machine, collected, columns), refresh=True)
    return collected


def page(machine: str, rows: Sequence[Row], columns: Sequence[str]) -> Group:
    """Return these columns of the results, under the machine and what all results share.

    Without ``columns`` there are all of the first row. A row that lacks one has nothing there.
    """
    varying, shared, cells = _laid_out(rows, columns or list(rows[0]))
    table = Table(*(Column(name, overflow="fold") for name in varying))
    for row in cells:
        table.add_row(*row)
    return Group(*map(Text, filter(None, (machine, shared))), table)


def markdown(rows: Sequence[Row]) -> str:
    """Return a table of the results in Markdown, under what all of them share; one: a sentence."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    varying, shared, cells = _laid_out(rows, columns)
    if len(rows) == 1:
        return ", ".join(f"{name} {cell}" for name, cell in zip(varying, cells[0], strict=True))
    lines = [varying, ["---"] * len(varying), *cells]
    table = [f"| {' | '.join(each.replace('|', '/') for each in line)} |" for line in lines]
    return "\n".join([*([f"{shared}\n"] if shared else []), *table])


def _laid_out(
    rows: Sequence[Row], columns: Sequence[str]
) -> tuple[list[str], str, list[list[str]]]:
    """Return the columns that vary, a text of the others, and the cells of each row."""
    cells = {column: [_cell(row.get(column)) for row in rows] for column in columns}
    shared = [name for name in columns if len(rows) > 1 and len(set(cells[name])) == 1]
    varying = [name for name in columns if name not in shared]
    described = ", ".join(f"{name} {cells[name][0]}" for name in shared if cells[name][0])
    lines = zip(*(cells[name] for name in varying), strict=True)
    return varying, described, [list(line) for line in lines]


def headline() -> str:
    """Return what every figure depends on: the machine, and the commit if it is known."""
    memory_gb = psutil.virtual_memory().total / 1e9
    machine = f"{cpu_model()}, {psutil.cpu_count()} cores, {memory_gb:.0f} GB"
    known = commit()
    return f"{machine}, commit {known}" if known else machine


def cpu_model(cpu_info: Path = CPU_INFO) -> str:
    """Return the processor's name, or its architecture where the name is not to be had."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def commit(root: Path = ROOT) -> str | None:
    """Return the git commit of the code, with "+" if files differ from it; None if not known."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _told(row: Row) -> Row:
    click.echo(json.dumps(row))
    return row


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
