"""The words of a submission, so that it can be repeated. Values of variables are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
from click.core import ParameterSource

from zmqtrain.config.commands import Command
from zmqtrain.config.options import PREFIX, flags_of
from zmqtrain.errors import ConfigError

ENV = "--env"
_WORDS = "zmqtrain.words"


class RecordedCommand(Command):
    """A command that knows the words with which it was called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = tuple(args)
        return super().parse_args(ctx, args)


def words_of(ctx: click.Context) -> tuple[str, ...]:
    """Return the words of a command, and those of the options that variables gave.

    Of a variable of the tasks only the name is left, unless it is an option of zmqtrain: its value
    may be secret.
    """
    by_variable = {
        name: ctx.params[name] if param.is_bool_flag else param.value_from_envvar(ctx)
        for param in ctx.command.params
        if isinstance(param, click.Option) and (name := param.name)
        if ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT
    }
    words = _split(ctx.meta[_WORDS])
    kept = [_without_value(word) if before == ENV else word for before, word in words]
    return (*kept, *flags_of(by_variable))


def repeated(
    words: Sequence[str], more: Sequence[str], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the words of a submission with others that replace some of them.

    Raises:
        ConfigError: a variable has no value, neither in ``more`` nor in ``environ``.
    """
    given = {word.partition("=")[0] for before, word in _split(more) if before == ENV}
    found: list[str] = []
    for before, word in _split(words):
        if before == ENV and "=" not in word:
            if word in given:
                found.pop()
                continue
            if word not in environ:
                raise ConfigError(
                    f"the job was submitted with {ENV} {word}=..., of which the value was not "
                    f"kept, as it may be secret; give it again, or set {word}"
                )
            word = f"{word}={environ[word]}"
        found.append(word)
    return (*found, *more)


def _split(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return each word with the one before it; ``--env=A`` are two words."""
    flat: list[str] = []
    for word in words:
        flat += [ENV, word[len(ENV) + 1 :]] if word.startswith(f"{ENV}=") else [word]
    return list(zip(["", *flat], flat, strict=False))


def _without_value(word: str) -> str:
    return word if word.startswith(PREFIX) else word.partition("=")[0]
