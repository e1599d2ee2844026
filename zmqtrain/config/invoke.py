"""Running a click command: errors become a line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

import click

from zmqtrain.errors import ExitCode, ZmqTrainError
from zmqtrain.hints import host_error
from zmqtrain.texts import printable_lines


def invoke(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run ``command``; return the exit code, see :class:`zmqtrain.errors.ExitCode`.

    An error that a user can correct becomes one line; a bug keeps its traceback.
    """
    if os.getpid() == 1:  # of a container: the kernel would keep SIGTERM from it
        signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.TERMINATED))
    _open_standard_files()
    try:
        code = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except click.Abort:
        click.echo("error: stopped by Ctrl-C", err=True)
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            return _refused(host_error(error) or error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        click.echo(f"error: the output cannot be written: {error.strerror}", err=True)
        return ExitCode.CRASH
    except Exception as error:
        return _refused(host_error(error) or error)
    return int(code or ExitCode.OK)


def _refused(error: Exception) -> int:
    """Show an error that a user can correct, and return its exit code; raise a bug."""
    if not isinstance(error, ZmqTrainError):
        raise error
    click.echo(f"error: {printable_lines(str(error))}", err=True)
    return error.exit_code


def _open_standard_files() -> None:
    """Open stdin, stdout and stderr if they are closed; a socket could get their numbers."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w", closefd=False))
