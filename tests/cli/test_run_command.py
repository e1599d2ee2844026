"""`zmqtrain run`: what it tells its tasks, and shows of them."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest

from zmqtrain.chief.progress import ProgressLog, line
from zmqtrain.cli import run
from zmqtrain.cli.main import main
from zmqtrain.config.options import flags_of
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.observe.logs import setup_logging
from zmqtrain.protocol.status import Status

JOB = "examples/digits.py"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stand-in for the function that starts the tasks."""
    start = Mock(side_effect=ConfigError("enough"))
    monkeypatch.setattr(run, "run_processes", start)
    monkeypatch.setattr(run, "limit_threads", Mock())
    return start


@pytest.mark.parametrize(
    "flags", [["--no-crash-safe"], ["--lane", "tcp"], ["--steps", "7"], ["--profile", "/dev/shm"]]
)
def test_options_of_a_run_reach_its_tasks(flags: list[str], started: Mock) -> None:
    assert main(["run", JOB, *flags]) == ExitCode.USAGE
    cluster, arguments = started.call_args.args[2:4]
    assert " ".join(flags) in " ".join([*flags_of(cluster.shared()), *arguments])


def test_mistyped_variable_is_reported(
    started: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZMQTRAIN_WORKER", "3")
    main(["run", JOB])
    assert "WARNING chief 0: ZMQTRAIN_WORKER is set" in capsys.readouterr().err


def test_news_of_a_run_appear_above_its_live_view(
    training: Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which Rich takes anything for a terminal
    setup_logging("chief 0", "warning")
    (handler,) = logging.getLogger().handlers
    assert isinstance(handler, logging.StreamHandler)
    before = handler.stream
    with run.display(JOB) as show:
        show(training)
        capsys.readouterr()
        logging.getLogger("zmqtrain.chief.saving").info("saved it")
        shown = capsys.readouterr().err
    assert shown.index("saved it") < shown.index(JOB)  # and the view is there again below
    assert handler.stream is before


def test_memory_lane_between_processes_is_refused(
    started: Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", JOB, "--lane", "memory"]) == ExitCode.USAGE
    assert "--lane (or ZMQTRAIN_LANE) is memory, but the tasks of" in capsys.readouterr().err
    started.assert_not_called()


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        (
            "TF_CONFIG",
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}',
            "TF_CONFIG makes this process a worker of a cluster, but zmqtrain run starts a whole",
        ),
        ("ZMQTRAIN_ROLE", "ps", "ZMQTRAIN_ROLE makes this process a ps of a cluster"),
        ("TF_CONFIG", "{", "TF_CONFIG is not valid JSON"),
    ],
)
def test_process_of_a_task_starts_no_cluster(
    variable: str,
    value: str,
    told: str,
    started: Mock,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["run", JOB]) == ExitCode.USAGE
    assert told in capsys.readouterr().err
    started.assert_not_called()


def test_tf_config_of_one_worker_is_ignored_by_a_run(
    started: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", document)
    main(["run", JOB, "--workers", "2"])
    assert started.call_args.args[2].workers == 2


def test_cluster_that_contradicts_the_strategy_is_reported_before_devices(
    started: Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", JOB, "--strategy", "mirrored", "--workers", "3"]) == ExitCode.USAGE
    assert "--workers (or ZMQTRAIN_WORKERS) or TF_CONFIG gives 3" in capsys.readouterr().err
    assert main(["run", JOB, "--strategy", "mirrored"]) == ExitCode.USAGE
    assert "expected devices such as gpu:0,gpu:1" in capsys.readouterr().err
    started.assert_not_called()


def test_loss_is_shown_after_the_first_push(training: Status) -> None:
    nan = float("nan")
    begun = replace(training, loss=nan, pushes=dict.fromkeys(training.pushes, 0))
    refused = replace(begun, pushes=begun.pushes | {"refused": 1})
    assert "  loss -  " in line(begun)
    assert "  loss nan  " in line(refused)
    assert f"  loss {training.loss:.4f}  " in line(training)


@pytest.mark.integration
@pytest.mark.parametrize(("redirection", "code"), [("<&- >&- 2>&-", 0), (">/dev/full", 1)])
def test_closed_or_full_standard_files_do_not_crash_a_run(redirection: str, code: int) -> None:
    command = shlex.join(
        [sys.executable, "-m", "zmqtrain", "run", JOB, "--steps", "20", "--workers", "1"]
    )
    done = subprocess.run(["sh", "-c", f"{command} {redirection}"], timeout=100)
    assert done.returncode == code


def test_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which Rich takes anything for a terminal
    monkeypatch.setenv("TERM", "dumb")
    with run.display(JOB) as show:
        assert isinstance(show, ProgressLog)
