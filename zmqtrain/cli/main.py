"""`zmqtrain`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from zmqtrain import __version__
from zmqtrain.cli.chaos import chaos_command
from zmqtrain.cli.check import check_command
from zmqtrain.cli.clean import clean_command
from zmqtrain.cli.control import policy_command, save_command
from zmqtrain.cli.keys import keys_command
from zmqtrain.cli.placement import placement_command
from zmqtrain.cli.run import run_command
from zmqtrain.cli.status import status_command
from zmqtrain.cli.supervise import supervise_command
from zmqtrain.cli.why import why_command
from zmqtrain.invoke import invoke

COMMANDS: tuple[click.Command, ...] = (
    run_command,
    status_command,
    why_command,
    policy_command,
    save_command,
    placement_command,
    check_command,
    clean_command,
    keys_command,
    supervise_command,
    chaos_command,
)
"""In the order in which the help lists them."""


class _Ordered(click.Group):
    """Lists its commands as they were added, not by the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Ordered, commands=COMMANDS, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="zmqtrain", message="%(prog)s %(version)s")
def cli() -> None:
    """Train with parameter servers over ZeroMQ, and look after jobs that run.

    \b
    Examples:
      zmqtrain run examples/digits.py --workers 2
      zmqtrain status --watch
      zmqtrain COMMAND --help
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code."""
    return invoke(cli, "zmqtrain", arguments)


if __name__ == "__main__":
    sys.exit(main())
