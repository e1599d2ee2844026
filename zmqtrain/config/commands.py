"""Commands: their help, options that are numbers of seconds, and how one is run.

``--help`` fits a screen: two examples first, then the usual options. ``--help-all`` shows every
example and option, in full. Both are made from the docstring, whose block of examples comes last,
and from the options.
"""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import Any

import click

from zmqtrain.errors import ExitCode, ZmqTrainError
from zmqtrain.hints import host_error
from zmqtrain.texts import printable_lines

ALL = "zmqtrain.help_all"
"""Key of a context's ``meta`` under which ``--help-all`` is noted."""

USUAL = (
    *("ps", "workers", "index", "job", "policy", "batch_size", "epochs", "steps", "data"),
    *("logdir", "keys", "on", "image", "hosts", "address", "max_workers", "cpu", "memory", "gpu"),
    *("max_restarts", "within_s"),
)
"""Options of jobs and tasks that ``--help`` shows; those of a command itself are all shown."""


_CLAUSE = re.compile(r"(?:(?:\S+ ){0,2}\S+: )?.*?(?=; |: | \(|$)", re.DOTALL)
"""The first clause of a text, after the name of the engine or command that it applies to."""

_BOUNDS = re.compile(r"  \[(?:env var: [^];]*(?:; )?)?((?:default|required|x|[0-9])[^]]*)\]$")
"""What click adds to a text, after the name of a variable: the default and bounds."""


class _ExamplesFirst(click.Command):
    examples: int | None = None
    """Number of examples that ``--help`` shows, None: all."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        text, _, examples = cleandoc(self.help or "").partition("\b\nExamples:\n")
        formatter.write_paragraph()
        for line in examples.splitlines()[: None if ctx.meta.get(ALL) else self.examples]:
            formatter.write(f"  {line.strip()}\n")
        formatter.write_paragraph()
        formatter.write_text(text.strip())


class Command(_ExamplesFirst):
    """A command with a short help and a full one."""

    examples = 2

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *params, of_help = super().get_params(ctx)
        return [*params, HELP_ALL, of_help]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if ctx.meta.get(ALL):
            super().format_options(ctx, formatter)
            return
        with formatter.section("Options"):
            formatter.write_dl([_short(param, ctx) for param in self._usual(ctx)], col_max=22)

    def _usual(self, ctx: click.Context) -> list[click.Parameter]:
        return [
            param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            and not param.hidden
            and (param.envvar is None or param.name in USUAL)
        ]


class Group(_ExamplesFirst, click.Group):
    """A command that has others."""

    command_class = Command


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a command of zmqtrain, as ``click.command`` does."""
    return click.command(name, cls=Command, **attributes)


def _short(param: click.Parameter, ctx: click.Context) -> tuple[str, str]:
    record = param.get_help_record(ctx)
    assert record is not None
    name, text = record
    clause = _CLAUSE.match(getattr(param, "help", None) or text)
    bounds = _BOUNDS.search(text)
    return name, f"{clause[0] if clause else text}{f'  [{bounds[1]}]' if bounds else ''}"


def _show_all(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_all,
    help="Show everything, and exit.",
)


class FiniteRange(click.FloatRange):
    """``click.FloatRange`` without NaN and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def seconds_option(
    name: str, default: float, help: str, envvar: str | None = None
) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Return an option that takes a positive number of seconds."""
    return click.option(
        name,
        type=FiniteRange(0, min_open=True),
        default=default,
        metavar="NUMBER",
        show_default=True,
        envvar=envvar,
        show_envvar=True,
        help=help,
    )


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
