"""Each option is declared once: as a field, from which its flag and its variable follow."""

from __future__ import annotations

import ast
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner, Result
from pydantic import BaseModel, Field

from zmqtrain.config.options import (
    fields_of,
    flag_of,
    mistyped,
    names_of,
    option_of,
    options_of,
    text_of,
    values_of,
    variable_of,
)
from zmqtrain.config.task import TaskConfig
from zmqtrain.job import Job
from zmqtrain.local.processes import LocalCluster

OPTIONS = """
    job index base_port ps workers max_workers chief on_term bind keys insecure metrics_host
    metrics_port metrics_cert metrics_key ended_file threads log_level log_format
    join_timeout_s heartbeat_s lease_s peer_timeout_s grace_s lane segment_dir crash_safe profile
    trace
    policy strategy exchange copies devices batch_size epochs steps_per_epoch steps seed own_loop
    data evaluate_every logdir save_secs save_steps upload keep_checkpoints l2
    clip_norm clip_norm_each clip_value moving_average average_ramp evaluate_average max_nonfinite
    compression placement partition_nbytes consistent_reads prefetch device ps_device overlap
    inner_state
""".split()


def invoke(
    model: type[BaseModel], *arguments: str, environ: dict[str, str] | None = None
) -> Result:
    """Run a command with all options of a model, which prints those that were given."""

    @click.command()
    @options_of(model, optional=True)
    def show(**flags: Any) -> None:
        click.echo(repr(values_of(model, flags)))

    return CliRunner().invoke(show, list(arguments), env=environ, terminal_width=200)


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), (7, "7"), (("gpu:0", "gpu:1"), "gpu:0,gpu:1"), ((), "")]
)
def test_text_of_a_value(value: object, text: str) -> None:
    assert text_of(value) == text


def test_list_of_options_is_known() -> None:
    """A new option is a promise to users: it is added here on purpose."""
    assert [name for model in (TaskConfig, Job) for name in fields_of(model)] == OPTIONS


def test_names_follow_from_the_field() -> None:
    assert flag_of("batch_size") == "--batch-size"
    assert variable_of("batch_size") == "ZMQTRAIN_BATCH_SIZE"
    assert names_of("batch_size") == "--batch-size (or ZMQTRAIN_BATCH_SIZE)"


@pytest.mark.parametrize(
    ("model", "arguments", "environ", "values"),
    [
        (Job, [], {}, {}),
        (Job, ["--steps", "1"], {"ZMQTRAIN_STEPS": "2"}, {"steps": 1}),
        (Job, [], {"ZMQTRAIN_STEPS": "2"}, {"steps": 2}),
        (Job, [], {"ZMQTRAIN_STEPS": ""}, {}),
        (Job, [], {"ZMQTRAIN_WORKERS": "2"}, {}),
        (Job, ["--data", "here"], {}, {"data": "here"}),
        (Job, ["--l2", "0"], {}, {"l2": 0.0}),
        (Job, ["--policy", "beside_the_job:Mine"], {}, {"policy": "beside_the_job:Mine"}),
        (Job, [], {"ZMQTRAIN_OVERLAP": "yes"}, {"overlap": True}),
        (Job, ["--no-overlap"], {"ZMQTRAIN_OVERLAP": "1"}, {"overlap": False}),
        (TaskConfig, ["--ps", "h:1, H:2"], {}, {"ps": ("h:1", "h:2")}),
        (TaskConfig, ["--ps", "2"], {}, {"ps": ("", "")}),
        (TaskConfig, ["--no-chief"], {}, {"chief": False}),
    ],
)
def test_flag_beats_variable_and_an_empty_variable_is_ignored(
    model: type[BaseModel], arguments: list[str], environ: dict[str, str], values: dict[str, Any]
) -> None:
    assert ast.literal_eval(invoke(model, *arguments, environ=environ).output) == values


@pytest.mark.parametrize(
    ("model", "name", "value", "expected"),
    [
        (Job, "steps", "x", "a whole number"),
        (Job, "steps", "1.5", "a whole number"),
        (Job, "steps", "0", "at least 1"),
        (Job, "moving_average", "1", "less than 1"),
        (Job, "clip_norm", "0", "more than 0"),
        (Job, "policy", "hogwlid", "did you mean hogwild?"),
        (Job, "compression", "fp17", "fp16"),
        (TaskConfig, "metrics_port", "65536", "at most 65535"),
        (TaskConfig, "threads", "1025", "at most 1024"),
        (TaskConfig, "grace_s", "soon", "a number"),
        (TaskConfig, "log_level", "inof", "did you mean info?"),
        (TaskConfig, "bind", "", "not empty"),
        (TaskConfig, "ps", "h:1,grpc://h:2", "grpc://"),
        (TaskConfig, "chief", "maybe", "boolean"),
    ],
)
def test_wrong_value_is_refused_with_its_flag_its_variable_and_what_was_expected(
    model: type[BaseModel], name: str, value: str, expected: str
) -> None:
    is_switch = name == "chief"
    result = (
        invoke(model, environ={variable_of(name): value})
        if is_switch
        else invoke(model, flag_of(name), value)
    )
    assert result.exit_code == 2
    for text in (f"for {names_of(name)}: ", repr(value), expected):
        assert text in result.output


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("model", [TaskConfig, Job, LocalCluster])
def test_numbers_are_finite(model: type[BaseModel], text: str) -> None:
    names = [name for name, field in fields_of(model).items() if field.annotation is float]
    assert names
    for name in names:
        assert "expected a finite number" in invoke(model, flag_of(name), text).output


class Base(BaseModel):
    inherited_s: float = Field(2.5, description="seconds of something")


class Example(Base):
    internal: int = 0
    count: int | None = Field(None, description="how many")
    size: int = Field(description="how large")
    mode: Literal["slow", "fast"] = Field("slow", description="how fast")


def test_help_shows_type_description_variable_and_default() -> None:
    @click.command()
    @options_of(Example)
    def command(**flags: Any) -> None:
        pass

    text = CliRunner().invoke(command, ["--help"], terminal_width=200).output
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("--")]
    assert [" ".join(line.split()) for line in lines] == [
        "--count INTEGER how many [env var: ZMQTRAIN_COUNT]",
        "--size INTEGER how large [env var: ZMQTRAIN_SIZE; required]",
        "--mode [slow|fast] how fast (default: slow) [env var: ZMQTRAIN_MODE]",
        (
            "--inherited-s NUMBER seconds of something (default: 2.5) "
            "[env var: ZMQTRAIN_INHERITED_S]"
        ),
        "--help Show this message and exit.",
    ]


def test_option_may_mean_something_narrower() -> None:
    @click.command()
    @option_of(Example, "size", help="of the box", optional=True)
    def command(**flags: Any) -> None:
        pass

    text = CliRunner().invoke(command, ["--help"]).output
    assert "of the box" in text
    assert "required" not in text


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ZMQTRAIN_WORKER", "ZMQTRAIN_WORKERS"),
        ("ZMQTRAIN_PSS", "ZMQTRAIN_PS"),
        ("ZMQTRAIN_ELEPHANT", "remove it"),
    ],
)
def test_unknown_variable_is_reported(variable: str, meant: str) -> None:
    (text,) = mistyped({variable: "1", "OTHER": "1"}, TaskConfig, Job)
    assert variable in text
    assert meant in text


def test_variables_of_zmqtrain_and_of_kubernetes_are_ignored() -> None:
    ours = {variable_of(name): "1" for name in [*OPTIONS, "max_restarts", "dashboards"]}
    services = {
        "ZMQTRAIN_PORT": "tcp://10.0.0.1:2222",
        "ZMQTRAIN_PS_SERVICE_HOST": "10.0.0.1",
        "ZMQTRAIN_PS_SERVICE_PORT_METRICS": "9410",
        "ZMQTRAIN_PS_PORT_2222_TCP_ADDR": "10.0.0.1",
    }
    assert not list(mistyped(ours | services, TaskConfig, Job))
