"""Commands whose ``--help`` fits a screen: examples first, then the usual options.

``--help-all`` shows every option, in full. Both are made from the docstring, whose block of
examples comes last, and from the options.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc
from typing import Any

import click

ALL = "zmqtrain.help_all"
"""Key of a context's ``meta`` under which ``--help-all`` is noted."""

SHORT = 14
"""Number of options up to which a command hides none."""

EXAMPLES = 2
USUAL = (
    *("ps", "workers", "index", "job", "policy", "batch_size", "epochs", "steps", "data"),
    *("logdir", "keys", "on", "image", "hosts", "address", "max_workers", "cpu", "memory", "gpu"),
)
"""Options of jobs and tasks that ``--help`` shows; those of a command itself are all shown."""


_CLAUSE = re.compile(r"(?:(?:\S+ ){0,2}\S+: )?.*?(?=; |: | \(|$)", re.DOTALL)
"""The first clause of a text, after the name of the engine or command that it applies to."""


class Command(click.Command):
    """A command with a short help and a full one."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        return [*params[:-1], HELP_ALL, params[-1]] if self._is_long else params

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if ctx.meta.get(ALL) or not self._is_long:
            super().format_help(ctx, formatter)
            return
        text, _, examples = cleandoc(self.help or "").partition("\b\nExamples:\n")
        self.format_usage(ctx, formatter)
        formatter.write("\n")
        for line in examples.splitlines()[:EXAMPLES]:
            formatter.write(f"  {line.strip()}\n")
        formatter.write_paragraph()
        formatter.write_text(text.strip())
        with formatter.section("Options"):
            formatter.write_dl([_short(param, ctx) for param in self._usual(ctx)])

    @property
    def _is_long(self) -> bool:
        return len(self.params) > SHORT

    def _usual(self, ctx: click.Context) -> list[click.Parameter]:
        return [
            param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            and not param.hidden
            and (param.envvar is None or param.name in USUAL)
        ]


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a command of zmqtrain, as ``click.command`` does."""
    return click.command(name, cls=Command, **attributes)


def _short(param: click.Parameter, ctx: click.Context) -> tuple[str, str]:
    record = param.get_help_record(ctx)
    assert record is not None
    text = getattr(param, "help", None) or record[1]
    return record[0], _CLAUSE.match(text)[0]  # type: ignore[index]  # it matches any text


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
