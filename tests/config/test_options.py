"""Each option is declared once: as a field, from which its flag and its variable follow."""

from __future__ import annotations

import ast
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel, Field

from zmqtrain.config.options import (
    fields_of,
    flag_of,
    given,
    load,
    names_of,
    options_of,
    variable_of,
)
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ConfigError
from zmqtrain.job import JobOverrides
from zmqtrain.local.processes import LocalCluster

MODELS = (TaskConfig, JobOverrides)

OPTIONS = """
    job index base_port ps workers chief bind keys insecure lane segment_dir crash_safe
    metrics_host metrics_port metrics_cert metrics_key threads log_level join_timeout_s
    heartbeat_s lease_s peer_timeout_s grace_s
    policy batch_size steps seed data evaluate_every logdir save_secs keep_checkpoints l2
    clip_norm moving_average evaluate_average max_nonfinite compression placement
    partition_nbytes consistent_reads prefetch device ps_device overlap
""".split()


def command_of(*models: type[BaseModel]) -> click.Command:
    @click.command()
    @options_of(*models)
    def show(**flags: Any) -> None:
        click.echo(repr({name: value for name, value in flags.items() if value is not None}))

    return show


def run(*arguments: str, environ: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(command_of(*MODELS), list(arguments), env=environ)
    assert result.exit_code == 0, result.output
    return result.output.strip()


def test_list_of_options_is_known() -> None:
    """A new option is a promise to users: it is added here on purpose."""
    assert [name for model in MODELS for name in fields_of(model)] == OPTIONS


def test_flags_variables_and_fields_are_the_same_list() -> None:
    options = [p for p in command_of(*MODELS).params if isinstance(p, click.Option)]
    assert [option.name for option in options] == OPTIONS
    assert [option.opts[0] for option in options] == [flag_of(name) for name in OPTIONS]
    assert [option.envvar for option in options] == [variable_of(name) for name in OPTIONS]
    descriptions = [f.description for model in MODELS for f in fields_of(model).values()]
    assert [option.help for option in options] == descriptions


def test_names_follow_from_the_field() -> None:
    assert flag_of("batch_size") == "--batch-size"
    assert variable_of("batch_size") == "ZMQTRAIN_BATCH_SIZE"
    assert names_of("batch_size") == "--batch-size (or ZMQTRAIN_BATCH_SIZE)"


def test_option_is_none_unless_it_is_given() -> None:
    assert run() == "{}"


def test_flags_arrive_as_typed() -> None:
    assert ast.literal_eval(run("--batch-size", "x", "--no-chief", "--evaluate-average")) == {
        "chief": False,
        "batch_size": "x",
        "evaluate_average": True,
    }


def test_variables_are_left_to_the_configuration() -> None:
    assert run(environ={"ZMQTRAIN_BATCH_SIZE": "5"}) == "{}"


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ({"steps": "1"}, {"ZMQTRAIN_STEPS": "2"}, {"steps": "1"}),
        ({"steps": None}, {"ZMQTRAIN_STEPS": "2"}, {"steps": "2"}),
        (
            {"evaluate_average": False},
            {"ZMQTRAIN_EVALUATE_AVERAGE": "1"},
            {"evaluate_average": False},
        ),
        ({"steps": None}, {"ZMQTRAIN_STEPS": ""}, {}),
        ({"index": "1"}, {"ZMQTRAIN_WORKERS": "2"}, {}),
    ],
)
def test_flag_beats_variable(
    flags: dict[str, Any], environ: dict[str, str], said: dict[str, Any]
) -> None:
    assert given(JobOverrides, flags, environ) == said


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("model", [*MODELS, LocalCluster])
def test_numbers_are_finite(model: type[BaseModel], text: str) -> None:
    options = [p for p in command_of(model).params if getattr(p, "metavar", "") == "NUMBER"]
    names = [str(option.name) for option in options]
    assert len(names) > 3
    with pytest.raises(ConfigError) as caught:
        load(model, dict.fromkeys(names, text))
    for name in names:
        assert f"{names_of(name)} is {text!r}; it should be a finite number" in str(caught.value)


class Base(BaseModel):
    inherited_s: float = Field(2.5, description="seconds of something")


class Example(Base):
    internal: int = 0
    count: int | None = Field(None, description="how many")
    size: int = Field(description="how large")
    mode: Literal["slow", "fast"] = Field("slow", description="how fast")


def test_help_shows_type_description_variable_and_default() -> None:
    text = CliRunner().invoke(command_of(Example), ["--help"], terminal_width=200).output
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("--")]
    assert [" ".join(line.split()) for line in lines] == [
        "--count INTEGER how many [env var: ZMQTRAIN_COUNT]",
        "--size INTEGER how large [env var: ZMQTRAIN_SIZE]",
        "--mode [slow|fast] how fast [env var: ZMQTRAIN_MODE; default: (slow)]",
        (
            "--inherited-s NUMBER seconds of something [env var: ZMQTRAIN_INHERITED_S; "
            "default: (2.5)]"
        ),
        "--help Show this message and exit.",
    ]


def test_field_without_a_description_is_no_option() -> None:
    assert "internal" not in fields_of(Example)
    assert "role" not in fields_of(TaskConfig)
