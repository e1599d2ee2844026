"""Measures zmqtrain: `python -m bench NAME [--json]`."""

from __future__ import annotations

from importlib import import_module

import click

MODULES = (
    *(
        "push_pull",
        "all_reduce",
        "kernels",
        "train",
        "memory",
        "mirrored",
        "models",
        "profile",
        "tables",
    ),
    *("local_steps", "headline", "dashboard", "peers.command", "gpu.command", "simulate"),
)
COMMANDS: tuple[click.Command, ...] = tuple(
    getattr(import_module(f"bench.{name}"), f"{name.partition('.')[0]}_command") for name in MODULES
)


@click.group(commands=COMMANDS, context_settings={"max_content_width": 100, "show_default": True})
def main() -> None:
    """Measure zmqtrain on this machine."""


if __name__ == "__main__":
    main(prog_name="python -m bench")
