"""The view of `zmqtrain top`, a function of the statuses seen so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zmqtrain.chief.job_view import JobView
from zmqtrain.chief.status_history import StatusHistory
from zmqtrain.cli.output import FirstThatFits, cell, narrowing_line, task_table
from zmqtrain.observe.metrics import Phases
from zmqtrain.units import counted, duration

SHOWN_WAITS = 3
BAR = 20  # characters
FEWEST_ROWS = 5  # of tasks, on the lowest terminal
OTHER_ROWS = 17
PHASES = Phases.names()
GLYPHS, ASCII_GLYPHS = "░▒█▓▚·", "-~#=+."
STYLES = ("blue", "cyan", "green", "magenta", "yellow", "bright_black")
COLUMNS = ("task", "state", "steps/s", "time of a step", "behind", "silent", "restarts")


def top_view(
    watched: StatusHistory, title: str, news: Iterable[str], console: Console
) -> RenderableType:
    """Return a job for a person, with the tasks for which the console has room."""
    view, glyphs = watched.view, ASCII_GLYPHS if console.options.ascii_only else GLYPHS
    failure = view.status.failure
    below = [(text, "yellow") for text in view.absences()[:SHOWN_WAITS]]
    if watched.away_s:
        below.insert(0, (f"ps 0 has not answered for {duration(watched.away_s)}", "red"))
    for each in view.waits()[:SHOWN_WAITS]:
        since = duration(each.since_s)
        below.append((f"{each.owner} has waited {since} for {each.peer}: {each.reason}", ""))
    below += [(text, "dim") for text in news]
    return Group(
        cell(f"{title}: {view.state}", "red" if failure else "bold"),
        _progress(view),
        narrowing_line(view.headline(), fewest=2),
        *([cell(tables)] if (tables := view.tables()) else []),
        _legend([row.spent_s for row in view.tasks() if row.spent_s], glyphs),
        Text(),
        _tasks(view, max(FEWEST_ROWS, console.height - OTHER_ROWS), glyphs),
        *(cell(text, style) for text, style in below),
    )


def phase_bar(seconds: Sequence[float], glyphs: str = GLYPHS, width: int = BAR) -> Text:
    """Return a bar whose parts are as long as the phases took."""
    bar, done, end = Text(no_wrap=True), 0.0, 0
    for glyph, style, phase_s in zip(glyphs, STYLES, seconds, strict=False):
        done, begin = done + phase_s, end
        end = round(width * done / (sum(seconds) or 1))
        bar.append(glyph * (end - begin), style)
    return bar


def _progress(view: JobView) -> RenderableType:
    status = view.status
    if not (status.steps or status.epoch):  # an epoch has not begun yet
        return cell(f"step {status.step}")
    grid = Table.grid(padding=(0, 1, 0, 0))
    place = f"{status.step}/{status.steps}" if status.steps else f"{status.step}, {status.epoch}"
    text = cell(f"{place}{view.remaining}")
    grid.add_row(ProgressBar(total=1.0, completed=status.done, width=2 * BAR), text)
    return FirstThatFits([grid, text])


def _legend(spent: Sequence[tuple[float, ...]], glyphs: str) -> Text:
    """Return the share that each phase has of all workers' steps."""
    totals_s = [sum(each) for each in zip(*spent, strict=True)]
    result = Text(no_wrap=True, overflow="ellipsis")
    for phase, glyph, style, total_s in zip(PHASES, glyphs, STYLES, totals_s, strict=False):
        share = total_s / (sum(totals_s) or 1)
        result.append(f"{glyph} ", style).append(f"{phase} {share:.0%}   ")
    return result


def _tasks(view: JobView, most: int, glyphs: str) -> RenderableType:
    """Return the table of tasks; if not all have room, those that others may wait for."""
    rows = view.tasks()
    if len(rows) > most:
        rows.sort(key=lambda row: row.rank)
    bars = ({"time of a step": phase_bar(row.spent_s, glyphs)} for row in rows)
    texts = [row.texts | bar for row, bar in zip(rows, bars, strict=True)]
    hidden = len(rows) - most
    more = [f"and {counted(hidden, 'task')} more"] if hidden > 0 else []
    return Group(task_table(texts[:most], COLUMNS), *more)
