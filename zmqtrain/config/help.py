"""Commands whose ``--help`` fits a screen: two examples first, then the usual options.

``--help-all`` shows every example and option, in full. Both are made from the docstring, whose
block of examples comes last, and from the options.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc
from typing import Any

import click

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
