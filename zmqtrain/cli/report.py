"""`zmqtrain report`: a page of a run, made from its logdir."""

from __future__ import annotations

from pathlib import Path

import click

from zmqtrain.chief.run_record import RECORD_FILE, read_record
from zmqtrain.cli.ended import with_ending
from zmqtrain.cli.output import say, write_named
from zmqtrain.config.commands import command
from zmqtrain.errors import ConfigError
from zmqtrain.observe.page import report


@command("report")
@click.argument("logdir", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--html",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default="run.html",
    show_default=True,
    help="the file to write",
)
def report_command(*, logdir: Path, path: Path) -> None:
    """Write a page of the run in LOGDIR: its curves, and what happened.

    The page is one file that needs no network. It can also be made of a run that failed or was
    killed. While a job runs, its chief serves the same page at its metrics address.

    \b
    Examples:
      zmqtrain report runs/net
      zmqtrain report runs/net --html net.html
    """
    record = read_record(logdir)
    if record is None:
        raise ConfigError(
            f"{logdir} has no {RECORD_FILE}; expected the logdir of a job that has trained for "
            "some seconds"
        )
    write_named(path, report(with_ending(record, str(logdir))))
    say(f"{path} is written; open it in a browser")
