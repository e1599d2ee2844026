"""`zmqtrain`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from zmqtrain.config.invoke import invoke
from zmqtrain.errors import did_you_mean
from zmqtrain.hosting.signals import interrupts_kept

COMMANDS = {
    "run": "zmqtrain.cli.run:run_command",
    "status": "zmqtrain.cli.status:status_command",
    "top": "zmqtrain.cli.top:top_command",
    "why": "zmqtrain.cli.why:why_command",
    "policy": "zmqtrain.cli.control:policy_command",
    "save": "zmqtrain.cli.control:save_command",
    "stop": "zmqtrain.cli.control:stop_command",
    "submit": "zmqtrain.cli.submit:submit_command",
    "resubmit": "zmqtrain.cli.resubmit:resubmit_command",
    "upgrade": "zmqtrain.cli.resubmit:upgrade_command",
    "jobs": "zmqtrain.cli.submit:jobs_command",
    "logs": "zmqtrain.cli.logs:logs_command",
    "scale": "zmqtrain.cli.submit:scale_command",
    "checkpoints": "zmqtrain.cli.checkpoints:checkpoints_command",
    "export": "zmqtrain.cli.checkpoints:export_command",
    "placement": "zmqtrain.cli.placement:placement_command",
    "check": "zmqtrain.cli.check:check_command",
    "clean": "zmqtrain.cli.clean:clean_command",
    "keys": "zmqtrain.cli.keys:keys_command",
    "supervise": "zmqtrain.cli.supervise:supervise_command",
    "chaos": "zmqtrain.cli.chaos:chaos_command",
}
"""The functions of the commands, in the order of the help."""


class _Lazy(click.Group):
    """Imports only the command that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            ctx.fail(f"No such command {cmd_name!r}{did_you_mean(cmd_name, COMMANDS)}")
        module, name = COMMANDS[cmd_name].split(":")
        with interrupts_kept():
            command: click.Command = getattr(import_module(module), name)
        return command


@click.group(cls=_Lazy, context_settings={"max_content_width": 100})
@click.version_option(package_name="zmqtrain", prog_name="zmqtrain", message="%(prog)s %(version)s")
def cli() -> None:
    """Train across processes and hosts, with parameter servers or without, and steer running jobs.

    \b
    Examples:
      zmqtrain run examples/digits.py --workers 2
      zmqtrain top
      zmqtrain COMMAND --help
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code."""
    return invoke(cli, "zmqtrain", arguments)


if __name__ == "__main__":
    sys.exit(main())
