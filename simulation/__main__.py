"""`python -m simulation --seeds 5000`: many schedules; `--seed N`: one of them again."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from multiprocessing import get_context

import click

from simulation.drawing import draw
from simulation.run import run_seed, simulate, smallest
from simulation.schedule import Schedule
from zmqtrain.policies import make_policy

SHOWN = 10  # failed seeds that are shown
_KINDS = {
    "hosted": "--without-ps",
    "board": "--board",
    "hosts": "--hosts",
    "epochs": "--epochs",
    "clips": "--clips",
    "tables": "--tables",
}


@click.command("simulation", context_settings={"max_content_width": 100})
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=500,
    show_default=True,
    help="number of schedules",
)
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="first seed")
@click.option("--seed", type=click.IntRange(0), help="run this one, and print all its events")
@click.option("--policy", default="", help="run every schedule under this policy")
@click.option("--without-ps", "hosted", is_flag=True, help="every worker hosts a shard")
@click.option("--hosts", is_flag=True, help="each worker is on a host of its own; some are lost")
@click.option("--board", is_flag=True, help="worker 0 hosts the only shard, with a board for all")
@click.option("--epochs", is_flag=True, help="with epochs; workers measure parts of evaluations")
@click.option("--clips", is_flag=True, help="shards measure each mean before they apply it")
@click.option("--tables", is_flag=True, help="the model has rows, too")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=os.cpu_count() or 1,
    show_default="one for each core",
    help="processes that share the work",
)
def main(seeds: int, first: int, seed: int | None, policy: str, jobs: int, **kind: bool) -> None:
    """Run clusters in virtual time over a faulty network, and check the invariants.

    A seed decides everything: the cluster, its policy, and its faults with their times. A schedule
    that fails can be replayed by its seed.

    \b
    Examples:
      python -m simulation --seeds 5000
      python -m simulation --seed 1234
      python -m simulation --policy my_policies:Mine --seeds 1000
      python -m simulation --without-ps
      python -m simulation --board
      python -m simulation --hosts --epochs
    """
    if policy:
        make_policy(policy)
    if seed is not None:
        sys.exit(_replay(draw(seed, policy, **kind)))
    started = time.perf_counter()
    failed, messages = [], 0
    with get_context("spawn").Pool(jobs) as pool:
        run = partial(run_seed, policy=policy, **kind)
        for report in pool.imap(run, range(first, first + seeds), chunksize=10):
            messages += report.messages
            if report.broken:
                failed.append(report)
                if len(failed) <= SHOWN:
                    options = [f"--policy {policy}"] * bool(policy)
                    options += [flag for name, flag in _KINDS.items() if kind[name]]
                    replay = ["replay: python -m simulation --seed", str(report.schedule.seed)]
                    click.echo(f"{report}\n{' '.join([*replay, *options])}\n")
    seconds = time.perf_counter() - started
    click.echo(
        f"{seeds} schedules in {seconds:.1f} s, {messages / seeds:.0f} messages each: "
        f"{len(failed)} failed {[report.schedule.seed for report in failed] or ''}"
    )
    sys.exit(bool(failed))


def _replay(schedule: Schedule) -> bool:
    """Show all events of one schedule; return whether it failed."""
    report = simulate(schedule, click.echo)
    click.echo(report)
    if report.broken and report.schedule.faults:
        faults = [str(fault) for fault in smallest(report.schedule).faults]
        click.echo(f"it also fails with only these faults: {'; '.join(faults) or 'none'}")
    return bool(report.broken)


if __name__ == "__main__":
    main(prog_name="python -m simulation")
