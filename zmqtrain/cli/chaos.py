"""`zmqtrain chaos`: kill and pause tasks of a running job, and report how it recovers."""

from __future__ import annotations

import random
from dataclasses import asdict

import click
from rich.console import Group, RenderableType
from rich.text import Text

from zmqtrain.cli.output import cell, show, show_json, table
from zmqtrain.cli.remote import RemoteJob, about_a_job
from zmqtrain.config.commands import command, seconds_option
from zmqtrain.errors import ConfigError, PeerLostError
from zmqtrain.local.chaos import ROLES, Act, Chaos, Report, figures, schedule
from zmqtrain.units import counted, duration


@command("chaos")
@about_a_job
@click.option("--kill", metavar="ROLE=SECONDS,...", default="", help="kill a task at this interval")
@click.option(
    "--pause", metavar="ROLE=SECONDS,...", default="", help="pause a task at this interval"
)
@seconds_option("--pause-s", 2.0, "length of a pause in seconds")
@seconds_option("--seconds", 60.0, "how long to kill and pause tasks")
@click.option("--seed", type=int, help="repeat the schedule that was printed with this number")
@click.option("--dry-run", is_flag=True, help="print the schedule and do nothing")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def chaos_command(
    job: RemoteJob,
    *,
    kill: str,
    pause: str,
    pause_s: float,
    seconds: float,
    seed: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Kill and pause tasks of a running job.

    Only tasks on this host are touched. A supervisor must restart killed tasks: zmqtrain supervise,
    as in the Procfile, or Kubernetes. The chief of zmqtrain run is not killed, because all other
    tasks would end with it, nor is a task of zmqtrain run that has no restart left. A pause stops a
    process as a debugger does. The schedule depends only on the seed and on the size of the
    cluster; it stands still while the job does not answer for half a second.

    \b
    Examples:
      honcho start -c ps=2,worker=4         # in another shell
      zmqtrain chaos --kill worker=7,ps=10 --seconds 120
      zmqtrain chaos --kill ps=10 --pause worker=5 --pause-s 8 --seed 42
    """
    kills, pauses = _intervals("--kill", kill), _intervals("--pause", pause)
    if not kills and not pauses:
        raise ConfigError("nothing to do; expected --kill or --pause, such as --kill worker=7")
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    roles = [task.role for task in job.status().tasks]
    tasks = {role: roles.count(role) for role in ROLES}
    acts = schedule(chosen, seconds, tasks, kills, pauses, pause_s)
    if dry_run:
        show(_schedule(chosen, acts))
        return

    def show_line(line: str) -> None:
        if not as_json:
            show(Text(line))

    show_line(f"seed {chosen}: {_counts(acts)} in {seconds:g} s")
    report = Chaos(job.status, show_line, spent=job.spent).run(chosen, acts, seconds)
    if as_json:
        show_json(asdict(report) | {"roles": figures(report)})
    else:
        show(chaos_view(report))
    if report.silent:
        raise PeerLostError(report.silent)
    if lost := report.lost():
        names = ", ".join(sorted({done.act.task for done in lost}))
        raise PeerLostError(f"{names} did not come back; does a supervisor restart it?")


def chaos_view(report: Report) -> RenderableType:
    headings = ("role", "faults", "back", "median back", "worst")
    rows = [
        [duration(value) if isinstance(value, float) else value for value in row.values()]
        for row in figures(report)
    ]
    silence = duration(report.longest_silence_s)
    lines = [cell(text, "dim") for text in report.skipped]
    made = f"{len(report.done)} of {counted(report.planned, 'planned fault')} made"
    text = f"{made}; {report.steps} steps meanwhile; longest silence of the job: {silence}"
    lines.append(cell(text))
    if report.ended:
        lines.append(cell(f"the job ended: {report.ended}"))
    return Group(Text(), table(*headings, rows=rows, right=["faults", "back"]), *lines)


def _schedule(seed: int, acts: list[Act]) -> RenderableType:
    lines = [f"{act.at_s:6.1f} s  {act.kind} {act.task}" for act in acts]
    return Text("\n".join([f"seed {seed}: {_counts(acts)}", *lines]))


def _counts(acts: list[Act]) -> str:
    kills = sum(act.kind == "kill" for act in acts)
    return f"{counted(kills, 'kill')}, {counted(len(acts) - kills, 'pause')}"


def _intervals(flag: str, text: str) -> dict[str, float]:
    """Return the seconds by role of a text such as worker=7,ps=10."""
    intervals: dict[str, float] = {}
    for part in text.split(",") if text else ():
        role, _, number = part.partition("=")
        try:
            every_s = float(number)
        except ValueError:
            every_s = 0.0
        if role not in ROLES or not 0 < every_s < float("inf"):
            raise ConfigError(
                f"{flag} has {part!r}; expected a role ({', '.join(ROLES)}) and an interval in "
                "seconds, such as worker=7"
            )
        if role in intervals:
            raise ConfigError(
                f"{flag} has {role} twice; expected one interval for each role; remove one"
            )
        intervals[role] = every_s
    return intervals
