"""Output of the commands: aligned tables, numbers with units, JSON without NaN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zmqtrain.files import replace_file
from zmqtrain.hints import explaining
from zmqtrain.observe.summary import as_json
from zmqtrain.texts import printable, printable_lines

PIPED_WIDTH = 250  # columns; a reader of a pipe wants a row on one line
MOST_IN_A_CELL = 2000  # characters
FEWEST_COLUMNS = 3  # of a table of tasks, however narrow the terminal is
NUMBERS = ("step", "steps/s", "behind", "loss", "silent", "restarts")  # columns of such a table
STATE_STYLES = {"silent": "yellow", "left": "yellow", "waiting": "cyan"}


def show(view: RenderableType) -> None:
    """Write a view to stdout, in colour and folded to its width if that is a terminal."""
    console = Console()
    if console.is_terminal:
        console.print(view)
    else:
        click.echo(text_of(view), nl=False)


def show_result(value: Any, view: RenderableType, *, as_json: bool) -> None:
    """Write a result to stdout: its value as a line of JSON, else its view."""
    if as_json:
        show_json(value)
    else:
        show(view)


def say(text: str) -> None:
    """Write a text to stdout; control characters, which a peer may have put in, are escaped."""
    click.echo(printable_lines(text))


def write_named(path: Path, text: str) -> None:
    """Write a file that the user has named.

    Raises:
        ConfigError: it cannot be written.
    """
    remedy = (
        "expected a file in a directory that exists and that this user can write to; make the "
        "directory, or name another file"
    )
    with explaining(f"{path} cannot be written", remedy):
        replace_file(path, text.encode())


def text_of(view: RenderableType, width: int = PIPED_WIDTH) -> str:
    """Return a view as plain text, without trailing blanks."""
    console = Console(file=StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(view)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def show_json(value: Any) -> None:
    """Write one line of JSON to stdout; NaN and infinity become null."""
    click.echo(as_json(value))


def table(
    *headings: str,
    rows: Iterable[Sequence[object]] = (),
    right: Sequence[str] = (),
    folded: Sequence[str] = (),
) -> Table:
    """Return a table with these rows, cut to the headings; other values than Text become text.

    The columns named in ``right`` are aligned right; those in ``folded`` wrap if the terminal is
    too narrow.
    """
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        result.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading not in folded,
            overflow="fold",
        )
    for row in rows:
        result.add_row(
            *(each if isinstance(each, Text) else cell(each) for each in row[: len(headings)])
        )
    return result


@dataclass(frozen=True, slots=True)
class FirstThatFits:
    """Shows the first of these views for which the terminal is wide enough, else the last."""

    views: Sequence[RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=PIPED_WIDTH)
        for view in self.views:
            if Measurement.get(console, unlimited, view).maximum <= options.max_width:
                break
        yield view


def task_table(rows: Iterable[Mapping[str, object]], columns: Sequence[str]) -> FirstThatFits:
    """Return a table of tasks whose last columns a narrow terminal hides.

    ``rows``: the text of each task by column.
    """
    cells = [
        [
            cell(row[column], STATE_STYLES.get(str(row[column]), ""))
            if column == "state"
            else row[column]
            for column in columns
        ]
        for row in rows
    ]
    counts = range(len(columns), FEWEST_COLUMNS - 1, -1)
    return FirstThatFits([table(*columns[:count], rows=cells, right=NUMBERS) for count in counts])


def narrowing_line(parts: Sequence[str], fewest: int = 1) -> FirstThatFits:
    """Return a line whose last parts a narrow terminal hides, all but the ``fewest`` first."""
    counts = range(len(parts), fewest - 1, -1)
    return FirstThatFits([cell("   ".join(parts[:count])) for count in counts])


def cell(value: object, style: str = "") -> Text:
    """Return a value as a cell; markup and control characters in its text have no effect."""
    return Text(printable(str(value), MOST_IN_A_CELL), style=style)


def shape_of(shape: Sequence[int]) -> str:
    """Return a shape as "784 x 10", or "scalar"."""
    return " x ".join(map(str, shape)) or "scalar"
