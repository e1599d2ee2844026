"""`zmqtrain`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from zmqtrain.config.commands import ALL, HELP_ALL, Group, invoke
from zmqtrain.hints import did_you_mean
from zmqtrain.hosting.signals import interrupts_kept

FIRST_DAY = ("init", "run", "top", "why", "export")
"""Commands that ``zmqtrain --help`` shows; ``--help-all`` shows all."""

COMMANDS = {
    "init": "zmqtrain.cli.init:init_command",
    "run": "zmqtrain.cli.run:run_command",
    "status": "zmqtrain.cli.status:status_command",
    "top": "zmqtrain.cli.top:top_command",
    "why": "zmqtrain.cli.status:why_command",
    "policy": "zmqtrain.cli.control:policy_command",
    "save": "zmqtrain.cli.control:save_command",
    "stop": "zmqtrain.cli.control:stop_command",
    "submit": "zmqtrain.cli.submit:submit_command",
    "resubmit": "zmqtrain.cli.resubmit:resubmit_command",
    "upgrade": "zmqtrain.cli.resubmit:upgrade_command",
    "jobs": "zmqtrain.cli.jobs:jobs_command",
    "logs": "zmqtrain.cli.logs:logs_command",
    "scale": "zmqtrain.cli.submit:scale_command",
    "checkpoints": "zmqtrain.cli.checkpoints:checkpoints_command",
    "export": "zmqtrain.cli.checkpoints:export_command",
    "report": "zmqtrain.cli.checkpoints:report_command",
    "placement": "zmqtrain.cli.placement:placement_command",
    "check": "zmqtrain.cli.check:check_command",
    "doctor": "zmqtrain.cli.doctor:doctor_command",
    "clean": "zmqtrain.cli.clean:clean_command",
    "keys": "zmqtrain.cli.keys:keys_command",
    "supervise": "zmqtrain.cli.supervise:supervise_command",
    "chaos": "zmqtrain.cli.chaos:chaos_command",
}
"""The functions of the commands, in the order of the help."""


class _Lazy(Group):
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

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *params, of_help = super().get_params(ctx)
        return [*params, HELP_ALL, of_help]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = COMMANDS if ctx.meta.get(ALL) else FIRST_DAY
        commands = [(name, self.get_command(ctx, name)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(80)) for name, command in commands]
            )
        if more := len(COMMANDS) - len(names):
            formatter.write_paragraph()
            formatter.write_text(f"{more} more commands are in zmqtrain --help-all.")


@click.group(cls=_Lazy, context_settings={"max_content_width": 100})
@click.version_option(package_name="zmqtrain", prog_name="zmqtrain", message="%(prog)s %(version)s")
def cli() -> None:
    """Train a model on several processes and machines, with parameter servers or without.

    \b
    Examples:
      zmqtrain init net.py
      zmqtrain run net.py --workers 2
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code."""
    return invoke(cli, "zmqtrain", arguments)


if __name__ == "__main__":
    sys.exit(main())
