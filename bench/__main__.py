"""Measures zmqtrain: `python -m bench NAME [--json]`."""

from __future__ import annotations

import click

from bench import kernels as kernel_bench
from bench.compression import compression_command
from bench.headline import headline_command
from bench.memory import memory_command
from bench.options import json_option, megabytes_type, steps_for
from bench.output import report
from bench.peers.command import peers_command
from bench.profile import profile_command
from bench.push_pull import LANES, measure
from bench.simulate import simulate_command
from bench.train import train_command


@click.command("push-pull")
@click.option("--lane", type=click.Choice(LANES), default="tcp", show_default=True)
@click.option("--megabytes", type=megabytes_type, default="0.0003,0.3,1,13,100", show_default=True)
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--ps", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--rule", type=click.Choice(["sgd", "adam"]), default="sgd", show_default=True)
@click.option("--crash-safe/--no-crash-safe", default=True, show_default=True)
@click.option("--keys", is_flag=True, help="encrypt what travels on lane tcp")
@json_option
def push_pull_command(
    lane: str,
    megabytes: tuple[float, ...],
    workers: int,
    ps: int,
    rule: str,
    crash_safe: bool,
    keys: bool,
    as_json: bool,
) -> None:
    """Time one push+pull by size, with every byte touched and in place.

    \b
    Examples:
      python -m bench push-pull
      python -m bench push-pull --lane tcp --megabytes 0.0003,13 --workers 2 --rule adam
      python -m bench push-pull --lane shm --no-crash-safe
      python -m bench push-pull --lane tcp --keys
    """
    if keys and lane != "tcp":
        raise click.UsageError(f"--keys is for lane tcp; tensors do not travel on lane {lane}")
    rows = (
        measure(
            lane,
            size,
            workers=workers,
            ps=ps,
            rule=rule,
            mode=mode,
            steps=steps_for(size),
            crash_safe=crash_safe,
            encrypted=keys,
        )
        for size in megabytes
        for mode in ("touched", "in_place")
    )
    report(rows, as_json=as_json)


@click.command("kernels")
@click.option(
    "--rule", type=click.Choice(list(kernel_bench.RULES)), default="adam", show_default=True
)
@click.option("--megabytes", type=megabytes_type, default="1,13,100", show_default=True)
@json_option
def kernels_command(rule: str, megabytes: tuple[float, ...], as_json: bool) -> None:
    """Time one update on one core, in gigabytes of parameters a second.

    \b
    Examples:
      python -m bench kernels
      python -m bench kernels --rule sgd --megabytes 100 --json
    """
    rows = (row for size in megabytes for row in kernel_bench.measure(rule, size))
    report(rows, as_json=as_json)


COMMANDS: tuple[click.Command, ...] = (
    push_pull_command,
    kernels_command,
    train_command,
    memory_command,
    profile_command,
    headline_command,
    compression_command,
    peers_command,
    simulate_command,
)


@click.group(commands=COMMANDS, context_settings={"max_content_width": 100})
def main() -> None:
    """Measure zmqtrain on this machine."""


if __name__ == "__main__":
    main(prog_name="python -m bench")
