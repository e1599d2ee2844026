"""The words of a submission are kept without secrets, and repeated with others."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click
import pytest

from zmqtrain.cli.words import RecordedCommand, repeated, words_of
from zmqtrain.config.options import option_of
from zmqtrain.errors import ConfigError
from zmqtrain.job import Job


@click.command(cls=RecordedCommand)
@click.argument("job")
@click.option("--env", multiple=True)
@option_of(Job, "batch_size", optional=True)
def submit(**_: object) -> None: ...


@pytest.mark.parametrize(
    ("words", "environ", "kept"),
    [
        ("a.py --batch-size 7", {}, "a.py --batch-size 7"),
        ("a.py", {"ZMQTRAIN_BATCH_SIZE": "7"}, "a.py --batch-size 7"),
        ("a.py --batch-size 8", {"ZMQTRAIN_BATCH_SIZE": "7"}, "a.py --batch-size 8"),
        ("--env TOKEN=secret a.py", {}, "--env TOKEN a.py"),
        ("a.py --env=TOKEN=secret --env A=b=c", {}, "a.py --env TOKEN --env A"),
        ("a.py --env ZMQTRAIN_LEASE_S=20", {}, "a.py --env ZMQTRAIN_LEASE_S=20"),
    ],
)
def test_words_are_kept_without_the_values_of_variables(
    words: str, environ: Mapping[str, str], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert words_of(submit.make_context("submit", words.split())) == tuple(kept.split())


@pytest.mark.parametrize(
    ("words", "more", "environ", "found"),
    [
        ("a.py", "--steps 9", {}, "a.py --steps 9"),
        ("a.py --env A", "", {"A": "1"}, "a.py --env A=1"),
        ("a.py --env A", "--env A=2", {"A": "1"}, "a.py --env A=2"),
        ("a.py --env A --ps 2", "--env=A=2", {}, "a.py --ps 2 --env=A=2"),
        ("a.py --env ZMQTRAIN_LEASE_S=20", "", {}, "a.py --env ZMQTRAIN_LEASE_S=20"),
    ],
)
def test_repeated_words_have_their_variables_again(
    words: str, more: str, environ: Mapping[str, str], found: str
) -> None:
    assert repeated(words.split(), more.split(), environ) == tuple(found.split())


def test_variable_without_a_value_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=re.escape("--env A=..., of which the value was not")):
        repeated(["a.py", "--env", "A"], ["--env", "B=1"], {"B": "1"})
