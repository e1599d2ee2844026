"""`zmqtrain supervise`: a task that is started again when it crashes.

A supervisor starts before each task and lives beside it, so it imports little: `python -m
zmqtrain.cli.supervise` is the same command without what the others need, and click looks up its
variables, because `zmqtrain.config` brings all that a job is made of.
"""

from __future__ import annotations

import asyncio
import sys

import click

from zmqtrain.cli.numbers import seconds_type
from zmqtrain.config.invoke import invoke
from zmqtrain.config.restarts import USUAL_LIMITS, Limits
from zmqtrain.local.supervisor import supervise
from zmqtrain.observe.logs import FORMATS, setup_logging


@click.command(
    "supervise", context_settings={"max_content_width": 100, "allow_interspersed_args": False}
)
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=USUAL_LIMITS.max_restarts,
    show_default=True,
    envvar="ZMQTRAIN_MAX_RESTARTS",
    show_envvar=True,
    help="how many restarts there may be within --within-s seconds",
)
@click.option(
    "--within-s",
    type=seconds_type,
    default=USUAL_LIMITS.within_s,
    show_default=True,
    envvar="ZMQTRAIN_WITHIN_S",
    show_envvar=True,
    help="seconds after which a restart does not count any more",
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

    A restart follows if a signal killed it, if it lost a peer, or if it ended with a code that
    zmqtrain does not know; after 0.2 s, then after twice as long for each life in a row that was
    shorter than 5 s, up to 30 s. Any other code ends the supervision too, and it is its exit code.
    SIGTERM and Ctrl-C are passed on, and there is no restart after them. COMMAND dies with its
    supervisor.

    \b
    Examples:
      zmqtrain supervise -- python -m zmqtrain.roles.worker --job job.py --ps a:2222 --index 0
      zmqtrain supervise --max-restarts 3 --within-s 60 -- python -m zmqtrain.roles.ps --job job.py
    """
    setup_logging("supervise", "info", log_format)
    return asyncio.run(supervise(command, Limits(max_restarts, within_s)))


if __name__ == "__main__":
    sys.exit(invoke(supervise_command, "zmqtrain supervise"))
