"""What `zmqtrain top` shows: a function of the statuses that were seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zmqtrain.cli.output import (
    NOTHING,
    FirstThatFits,
    cell,
    narrowing_line,
    narrowing_table,
)
from zmqtrain.cli.status_words import (
    ABSENT,
    STATE_STYLES,
    absences,
    group_of,
    long_waits,
    loss_of,
    remaining_of,
    state_of,
)
from zmqtrain.config.cluster import Role
from zmqtrain.observe.metrics import Phases
from zmqtrain.protocol.status import Status, TaskStatus
from zmqtrain.units import counted, duration, rate

WINDOW = 6  # statuses over which speeds are measured
SHOWN_WAITS = 3
BAR = 20  # characters
FEWEST_ROWS = 5  # of tasks, on the lowest terminal
OTHER_ROWS = 16
PHASES = tuple(field.name for field in fields(Phases))
GLYPHS, ASCII_GLYPHS = "░▒█▓▚·", "-~#=+."
STYLES = ("blue", "cyan", "green", "magenta", "yellow", "bright_black")
COLUMNS = ("task", "state", "steps/s", "time of a step", "behind", "silent", "restarts")
FEWEST_COLUMNS = 3


class Watched:
    """The last statuses of a job; times are of the monotonic clock."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Status]] = deque(maxlen=WINDOW)
        self.away_s = 0.0  # how old the last one is, while ps 0 does not answer

    def take(self, status: Status | None, at: float) -> list[str]:
        """Add a status, None if ps 0 did not answer; return what has happened since the last."""
        if status is None:
            was_away, self.away_s = self.away_s > 0, at - self._seen[-1][0]
            return [] if was_away else ["ps 0 does not answer"]
        news = ["ps 0 answers again"] if self.away_s else []
        self.away_s = 0.0
        if self._seen:
            news += news_between(self.status, status)
        self._seen.append((at, status))
        return news

    @property
    def status(self) -> Status:
        return self._seen[-1][1]

    @property
    def earlier(self) -> Status:
        """The oldest status that is still known, from which speeds are measured."""
        return self._seen[0][1]

    @property
    def seconds(self) -> float:
        """The time between these two; 0 if they are one."""
        return self._seen[-1][0] - self._seen[0][0]

    @property
    def end(self) -> str:
        """How the job has ended, once there are no further statuses."""
        is_told = self.status.stop or self.status.failure
        return state_of(self.status) if is_told else "the job has ended"


def top_view(watched: Watched, title: str, news: Iterable[str], console: Console) -> RenderableType:
    """Return a job for a person, as far as the console has room for its tasks."""
    rows = max(FEWEST_ROWS, console.height - OTHER_ROWS)
    status, glyphs = watched.status, ASCII_GLYPHS if console.options.ascii_only else GLYPHS
    earlier = {task.task: task for task in watched.earlier.tasks}
    spent = {task.task: spent_s(task, earlier.get(task.task)) for task in status.tasks}
    below = [(text, "yellow") for text in absences(status)[:SHOWN_WAITS]]
    if watched.away_s:
        below.insert(0, (f"ps 0 has not answered for {duration(watched.away_s)}", "red"))
    for each in long_waits(status)[:SHOWN_WAITS]:
        since = duration(each.since_s)
        below.append((f"{each.owner} has waited {since} for {each.peer}: {each.reason}", ""))
    below += [(text, "dim") for text in news]
    return Group(
        cell(f"{title}: {state_of(status)}", "red" if status.failure else "bold"),
        _progress(status),
        _figures(watched),
        _legend([*filter(None, spent.values())], glyphs),
        Text(),
        _tasks(watched, spent, rows, glyphs),
        *(cell(text, style) for text, style in below),
    )


def news_between(before: Status, after: Status) -> list[str]:
    """Return what has happened between two statuses."""
    known = {task.task: task for task in before.tasks}
    news = []
    for task in after.tasks:
        earlier = known.get(task.task)
        if earlier is None:
            news.append(f"{task.task} joined")
        elif task.state == "left" != earlier.state:
            news.append(f"{task.task} left")
        elif task.restarts > earlier.restarts:
            news.append(f"{task.task} was started again")
        elif task.role == Role.CHIEF and task.step > earlier.step:
            news.append(f"a checkpoint of step {task.step} was saved")
    if after.step < before.step:
        news.append(f"the job went back from step {before.step} to {after.step}")
    if after.group > before.group:
        news.append(f"group {group_of(after)} goes on")
    if after.policy != before.policy:
        news.append(f"the policy is {after.policy}; it was {before.policy}")
    return news


def spent_s(task: TaskStatus, earlier: TaskStatus | None) -> tuple[float, ...]:
    """Return the seconds that a worker spent in each phase since an earlier status.

    Since the worker started, if no step has ended in between.
    """
    now = task.phases_s
    if earlier is None or len(earlier.phases_s) != len(now):
        return now
    since = tuple(b - a for a, b in zip(earlier.phases_s, now, strict=True))
    return since if sum(since) > 0 and min(since) >= 0 else now


def phase_bar(seconds: Sequence[float], glyphs: str = GLYPHS, width: int = BAR) -> Text:
    """Return a bar whose parts are as long as the phases took."""
    bar, done, end = Text(no_wrap=True), 0.0, 0
    for glyph, style, phase_s in zip(glyphs, STYLES, seconds, strict=False):
        done, begin = done + phase_s, end
        end = round(width * done / (sum(seconds) or 1))
        bar.append(glyph * (end - begin), style)
    return bar


def _progress(status: Status) -> RenderableType:
    if not status.steps:  # it ends after epochs
        return cell(f"step {status.step}")
    grid = Table.grid(padding=(0, 1, 0, 0))
    bar = ProgressBar(total=status.steps, completed=status.step, width=2 * BAR)
    text = cell(f"{status.step}/{status.steps}{remaining_of(status)}")
    grid.add_row(bar, text)
    return FirstThatFits([grid, text])


def _figures(watched: Watched) -> FirstThatFits:
    """Return the job's figures; a narrow terminal shows fewer."""
    before, status, seconds = watched.earlier, watched.status, watched.seconds
    speeds = [f"{rate(status.steps_per_second)} steps/s"]
    if seconds and status.step >= before.step:
        speeds = [
            f"{rate((status.step - before.step) / seconds)} steps/s",
            f"{rate((status.examples - before.examples) / seconds)} examples/s",
        ]
    change = f" -> {status.switching}" if status.switching else ""
    texts = [
        *speeds,
        f"loss {loss_of(status.loss)}",
        f"{status.policy}{change}",
        "staleness {mean:.2f} (p99 {p99:.0f})".format(**status.staleness),
        "{dropped} dropped".format(**status.pushes),
        *([f"group {status.group}"] if status.group > 1 else []),
        *([counted(status.rosters, "roster")] if status.rosters else []),
    ]
    return narrowing_line(texts, fewest=2)


def _legend(spent: Sequence[tuple[float, ...]], glyphs: str) -> Text:
    """Return the share that each phase has of all workers' steps."""
    totals_s = [sum(each) for each in zip(*spent, strict=True)]
    result = Text(no_wrap=True, overflow="ellipsis")
    for phase, glyph, style, total_s in zip(PHASES, glyphs, STYLES, totals_s, strict=False):
        share = total_s / (sum(totals_s) or 1)
        result.append(f"{glyph} ", style).append(f"{phase} {share:.0%}   ")
    return result


def _tasks(
    watched: Watched, spent: dict[str, tuple[float, ...]], rows: int, glyphs: str
) -> RenderableType:
    """Return the table of tasks; if not all have room, those that others may wait for."""
    tasks = list(watched.status.tasks)
    if len(tasks) > rows:
        tasks.sort(key=lambda task: (task.state not in ABSENT, -(task.behind or 0)))
    earlier = {task.task: task for task in watched.earlier.tasks}
    cells = [
        (
            task.task,
            cell(task.state, STATE_STYLES.get(task.state, "")),
            _speed(task, earlier.get(task.task), watched.seconds),
            phase_bar(spent[task.task], glyphs),
            NOTHING if task.behind is None else task.behind,
            duration(task.silent_s),
            task.restarts,
        )
        for task in tasks[:rows]
    ]
    hidden = len(tasks) - rows
    shown = narrowing_table(
        COLUMNS, cells, FEWEST_COLUMNS, ("steps/s", "behind", "silent", "restarts")
    )
    return Group(shown, *([f"and {counted(hidden, 'task')} more"] * (hidden > 0)))


def _speed(task: TaskStatus, earlier: TaskStatus | None, seconds: float) -> str:
    """Return the steps per second since an earlier status, "-" if that cannot be said."""
    if earlier is None or earlier.step > task.step or not seconds or task.role == Role.CHIEF:
        return NOTHING
    return rate((task.step - earlier.step) / seconds)
