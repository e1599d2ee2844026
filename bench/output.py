"""How benchmarks print: JSON lines for scripts; tables with machine and commit for people."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.table import Table

from bench.workload import Row

ROOT = Path(__file__).parent.parent
CPU_INFO = Path("/proc/cpuinfo")  # Linux only


def report(rows: Iterable[Row], *, as_json: bool, columns: Sequence[str] = ()) -> list[Row]:
    """Print results: as JSON each as soon as it is there, else all of them as one table.

    A table has the columns ``columns``, or all keys of the first row. Returns the results.
    """
    collected = []
    for row in rows:
        collected.append(row)
        if as_json:
            click.echo(json.dumps(row))
    if collected and not as_json:
        console = Console(width=140)
        console.print(headline(), highlight=False, markup=False)
        console.print(table(collected, columns or list(collected[0])))
    return collected


def table(rows: Iterable[Row], columns: Sequence[str]) -> Table:
    """Return these columns of the results; a row that lacks one has nothing there."""
    result = Table()
    for column in columns:
        result.add_column(column)
    for row in rows:
        result.add_row(*(_cell(row.get(column)) for column in columns))
    return result


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


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
