"""`zmqtrain chaos`: kill and pause tasks of a running job, and see how it fares."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from zmqtrain.cli.numbers import seconds_type
from zmqtrain.cli.output import cell, duration, show, show_json, table
from zmqtrain.cli.remote import RemoteJob, about_a_job
from zmqtrain.errors import ConfigError, PeerLostError
from zmqtrain.local.chaos import Act, Chaos, Report, figures, schedule

ROLES = ("ps", "worker", "chief")


@click.command("chaos")
@about_a_job
@click.option("--kill", metavar="ROLE=SECONDS,...", default="", help="kill one every so often")
@click.option("--pause", metavar="ROLE=SECONDS,...", default="", help="pause one every so often")
@click.option(
    "--pause-s",
    type=seconds_type,
    default=2.0,
    show_default=True,
    help="seconds that a pause lasts",
)
@click.option(
    "--seconds",
    type=seconds_type,
    default=60.0,
    show_default=True,
    help="how long to go on",
)
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

    Those of this host, that is; and it reports how the job fares. Whoever is
    killed must be started again by someone: by zmqtrain supervise, as the Procfile
    has it, or by Kubernetes. Pauses stop a process as a debugger would. The
    schedule depends on the seed and on the size of the cluster alone.

    \b
    Examples:
      honcho start -c ps=2,worker=4         # in another shell
      zmqtrain chaos --kill worker=7,ps=10 --seconds 120
      zmqtrain chaos --kill ps=10 --pause worker=5 --pause-s 8 --seed 42
    """
    kills, pauses = _intervals("--kill", kill), _intervals("--pause", pause)
    if not kills and not pauses:
        raise ConfigError("nothing is to be done; expected --kill or --pause, such as worker=7")
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

    show_line(f"seed {chosen}: {len(acts)} acts in {seconds:g} s")
    report = Chaos(job, show_line).run(chosen, acts, seconds)
    if as_json:
        show_json(chaos_json(report))
    else:
        show(chaos_view(report))
    if lost := report.lost():
        names = ", ".join(sorted({done.act.task for done in lost}))
        raise PeerLostError(f"{names} did not come back: does someone start it again?")


def chaos_view(report: Report) -> RenderableType:
    """Return what came of it for a person."""
    rows = table("role", "acts", "back", "median back", "worst", right=("acts", "back"))
    for role, acts, back, median, worst in figures(report):
        times = ["" if value is None else duration(value) for value in (median, worst)]
        rows.add_row(*map(cell, (role, str(acts), str(back), *times)))
    silence = duration(report.longest_silence_s)
    lines = [cell(text, "dim") for text in report.skipped]
    lines.append(cell(f"{report.steps} steps meanwhile; the job was silent for {silence} at most"))
    if report.ended:
        lines.append(cell(f"the job ended: {report.ended}"))
    return Group(Text(), rows, *lines)


def chaos_json(report: Report) -> dict[str, Any]:
    """Return what came of it for a script."""
    names = ("role", "acts", "back", "median_s", "worst_s")
    return {
        "seed": report.seed,
        "steps": report.steps,
        "longest_silence_s": report.longest_silence_s,
        "ended": report.ended,
        "roles": [dict(zip(names, row, strict=True)) for row in figures(report)],
        "done": [asdict(done) for done in report.done],
        "skipped": report.skipped,
    }


def _schedule(seed: int, acts: list[Act]) -> RenderableType:
    lines = [f"{act.at_s:6.1f} s  {act.kind} {act.task}" for act in acts]
    return Text("\n".join([f"seed {seed}: {len(acts)} acts", *lines]))


def _intervals(flag: str, text: str) -> dict[str, float]:
    """Return seconds by role.

    Raises:
        ConfigError: the text is something else, or has a role twice.
    """
    intervals: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        role, _, number = part.partition("=")
        try:
            every_s = float(number)
        except ValueError:
            every_s = 0.0
        if role not in ROLES or not 0 < every_s < float("inf"):
            raise ConfigError(
                f"{flag} has {part!r}; expected a role ({', '.join(ROLES)}) and seconds between "
                "two such acts, such as worker=7"
            )
        if role in intervals:
            raise ConfigError(
                f"{flag} has {role} twice; expected each role once, as its acts come at one "
                "interval; leave one out"
            )
        intervals[role] = every_s
    return intervals
