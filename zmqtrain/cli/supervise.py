"""`zmqtrain supervise`: restart a task when it crashes.

A supervisor runs beside each task, so it imports little: `python -m zmqtrain.cli.supervise` is the
same command without the imports of the others, and click reads its variables, since
`zmqtrain.config` imports all that a job needs.
"""

from __future__ import annotations

import asyncio
import sys

import click

from zmqtrain.config.commands import command, invoke, seconds_option
from zmqtrain.config.restarts import USUAL_LIMITS, Limits
from zmqtrain.local.supervisor import supervise
from zmqtrain.observe.logs import FORMATS, setup_logging


@command("supervise", context_settings={"max_content_width": 100, "allow_interspersed_args": False})
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=USUAL_LIMITS.max_restarts,
    show_default=True,
    envvar="ZMQTRAIN_MAX_RESTARTS",
    show_envvar=True,
    help="largest number of restarts within --within-s seconds",
)
@seconds_option(
    "--within-s",
    USUAL_LIMITS.within_s,
    "seconds after which a restart no longer counts",
    envvar="ZMQTRAIN_WITHIN_S",
)
@click.option(
    "--log-format",
    type=click.Choice(list(FORMATS)),
    default="text",
    show_default=True,
    envvar="ZMQTRAIN_LOG_FORMAT",
    show_envvar=True,
    help="how restarts are logged",
)
def supervise_command(
    command: tuple[str, ...], max_restarts: int, within_s: float, log_format: str
) -> int:
    """Run COMMAND, and run it again when it crashes.

    It is restarted if a signal killed it, if it lost a peer, or if zmqtrain does not know its exit
    code: after 0.2 s, then after twice as long each time that it ran for less than 5 s, up to 30 s.
    With any other exit code the supervisor ends, too, with the same code. SIGTERM and Ctrl-C are
    passed on, without a restart. COMMAND is killed if its supervisor dies.

    \b
    Examples:
      zmqtrain supervise -- python -m zmqtrain.roles.worker --job job.py --ps a:2222 --index 0
      zmqtrain supervise --max-restarts 3 --within-s 60 -- python -m zmqtrain.roles.ps --job job.py
    """
    setup_logging("supervise", "info", log_format)
    return asyncio.run(supervise(command, Limits(max_restarts, within_s)))


if __name__ == "__main__":
    sys.exit(invoke(supervise_command, "zmqtrain supervise"))
