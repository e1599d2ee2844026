"""`python -m tests.faults.soak --minutes 10`: everything at once, again and again.

Batches of simulated schedules take turns with jobs of real processes that are killed, each with
seeds of its own, until the time is up. Run it from the project's root.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import get_context

import click
from click.testing import CliRunner
from rich.console import Console

from bench.headline import headline_command
from simulation.run import Report, run_seed

BATCH = 200  # schedules between two real runs
REAL_RUN = ("--seconds", "25", "--steps", "2500", "--seed")
KILLED = "everyone killed is back"  # the promise with the number of kills

console = Console(highlight=False)

RunSeeds = Callable[[Callable[[int], Report], Iterable[int]], Iterable[Report]]
"""Runs schedules of these seeds: `map`, or that of a pool of processes."""


@dataclass(slots=True)
class Side:
    """One kind of runs, and their results."""

    name: str
    runs: int = 0
    kills: int = 0  # in runs in which everything held
    failed: list[str] = field(default_factory=list)  # the command that repeats each

    def fail(self, replay: str, reason: str) -> None:
        self.failed.append(replay)
        console.print(f"{reason}\nreplay: {replay}", style="red", markup=False)


def run_schedules(side: Side, seeds: Iterable[int], run_seeds: RunSeeds) -> None:
    """Run simulated schedules."""
    for report in run_seeds(run_seed, seeds):
        side.runs += 1
        if report.broken:
            replay = f"python -m simulation --seed {report.schedule.seed}"
            side.fail(replay, str(report))
        else:
            side.kills += sum(fault.kind == "kill" for fault in report.schedule.faults)


def run_processes(side: Side, seed: int) -> None:
    """Run one job of real processes and check its promises."""
    arguments = [*REAL_RUN, str(seed)]
    result = CliRunner().invoke(headline_command, [*arguments, "--json"])
    rows = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    side.runs += 1
    if result.exit_code:
        broken = [f"{row['promise']}: {row['seen']}" for row in rows if not row["kept"]]
        replay = f"python -m bench headline {' '.join(arguments)}"
        side.fail(replay, "\n".join(broken) or repr(result.exception))
    else:
        side.kills += sum(int(row["seen"].split()[0]) for row in rows if row["promise"] == KILLED)


def soak(seed: int, is_over: Callable[[], bool], run_seeds: RunSeeds) -> tuple[Side, Side]:
    """Run both sides in turn, from ``seed`` on, until it is over."""
    simulated, real = Side("simulated schedules"), Side("real runs")
    while not is_over():
        first = seed + simulated.runs
        run_schedules(simulated, range(first, first + BATCH), run_seeds)
        if not is_over():
            run_processes(real, seed + real.runs)
        failed = len(simulated.failed) + len(real.failed)
        console.print(f"{simulated.runs} schedules, {real.runs} real runs, {failed} failed")
    return simulated, real


def show(sides: Iterable[Side]) -> None:
    """Print the results of the runs."""
    for side in sides:
        kills = f"{side.kills} kills survived"
        console.print(f"{side.name}: {side.runs} runs, {kills}, {len(side.failed)} failed")
        for replay in side.failed:
            console.print(f"replay: {replay}", soft_wrap=True)


@click.command("soak", context_settings={"max_content_width": 100})
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True
)
@click.option(
    "--seed", type=click.IntRange(0), help="of the first schedule and run; drawn by default"
)
def main(minutes: float, seed: int | None) -> None:
    """Run simulated and real jobs under faults until the time is up; exit with 1 if one failed.

    \b
    Examples:
      python -m tests.faults.soak
      python -m tests.faults.soak --minutes 600 --seed 1000000
    """
    seed = secrets.randbelow(10**9) if seed is None else seed
    console.print(f"seed {seed}")
    ends_at = time.monotonic() + 60 * minutes
    with get_context("spawn").Pool() as pool:
        sides = soak(seed, lambda: time.monotonic() > ends_at, pool.imap_unordered)
    show(sides)
    sys.exit(any(side.failed for side in sides))


if __name__ == "__main__":
    main(prog_name="python -m tests.faults.soak")
