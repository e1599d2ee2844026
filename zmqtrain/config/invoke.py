"""Running a command of ours as a process does: errors become a line on stderr and an exit code."""

from __future__ import annotations

from collections.abc import Sequence

import click

from zmqtrain.errors import ExitCode, ZmqTrainError


def invoke(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run ``command``; return the exit code, see :class:`zmqtrain.errors.ExitCode`.

    What a user can mend is told in a line; a bug keeps its traceback.
    """
    try:
        code = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except click.Abort:
        return ExitCode.INTERRUPTED
    except ZmqTrainError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    return int(code or ExitCode.OK)
