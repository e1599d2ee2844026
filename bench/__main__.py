"""Measures zmqtrain: `python -m bench NAME [--json]`."""

from __future__ import annotations

import click

from bench.all_reduce import all_reduce_command
from bench.dashboard import dashboard_command
from bench.headline import headline_command
from bench.kernels import kernels_command
from bench.memory import memory_command
from bench.mirrored import mirrored_command
from bench.models import models_command
from bench.peers.command import peers_command
from bench.profile import profile_command
from bench.push_pull import push_pull_command
from bench.simulate import simulate_command
from bench.train import train_command

COMMANDS: tuple[click.Command, ...] = (
    push_pull_command,
    all_reduce_command,
    kernels_command,
    train_command,
    memory_command,
    mirrored_command,
    models_command,
    profile_command,
    headline_command,
    dashboard_command,
    peers_command,
    simulate_command,
)


@click.group(commands=COMMANDS, context_settings={"max_content_width": 100, "show_default": True})
def main() -> None:
    """Measure zmqtrain on this machine."""


if __name__ == "__main__":
    main(prog_name="python -m bench")
