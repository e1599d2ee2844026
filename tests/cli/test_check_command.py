"""`zmqtrain check`: what the doctor says reaches the user, with an exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.cli import check
from zmqtrain.cli.main import main
from zmqtrain.config.cluster import Role
from zmqtrain.config.findings import Finding, Severity
from zmqtrain.errors import ExitCode

CLUSTER = {"ps": ["p:1"], "worker": ["w:1"]}


def write(path: Path, role: str, cluster: dict[str, list[str]] = CLUSTER) -> str:
    path.write_text(json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}}))
    return str(path)


def test_sound_task_is_summed_up_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--role", "worker", "--ps", "ipc:///tmp/a", "--workers", "2", "--index", "1"]
    assert main(["check", *arguments, "--metrics-port", "0"]) == ExitCode.OK
    assert capsys.readouterr().out == (
        "ok: this is worker 1 of a cluster with 1 ps (ipc:///tmp/a), 2 workers and a chief of its "
        "own\n"
    )


def test_mistakes_of_task_and_job_are_told_and_exit_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--index", "3", "--policy", "hogwlid"]) == ExitCode.USAGE
    out = capsys.readouterr().out
    assert "error: --policy (or ZMQTRAIN_POLICY) is 'hogwlid'" in out
    assert "error: --index (or ZMQTRAIN_INDEX) is 3; expected 0 for a worker" in out


def test_tf_config_of_the_environment_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main(["check"]) == ExitCode.USAGE
    assert capsys.readouterr().out.startswith("error: TF_CONFIG is not valid JSON")


def test_role_and_reach_are_the_doctor_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def diagnose(role: Role | None, flags: dict[str, Any], *, reach: bool) -> list[Finding]:
        asked.append((role, flags["ps"], reach))
        return [Finding(Severity.WARNING, "strange"), Finding(Severity.OK, "fine")]

    monkeypatch.setattr(check, "diagnose", diagnose)
    assert main(["check", "--role", "ps", "--reach", "--ps", "a:1"]) == ExitCode.OK
    assert main(["check"]) == ExitCode.OK
    assert asked == [(Role.PS, "a:1", True), (None, None, False)]
    assert capsys.readouterr().out == "warning: strange\nok: fine\n" * 2


def test_files_that_agree_are_told_and_exit_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(tmp_path / f"{role}.json", role) for role in CLUSTER]
    assert main(["check", *files]) == ExitCode.OK
    assert capsys.readouterr().out == "ok: 2 TF_CONFIGs agree on the cluster\n"


def test_files_that_differ_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        write(tmp_path / "ps.json", "ps"),
        write(tmp_path / "worker.json", "worker", {**CLUSTER, "ps": ["q:1"]}),
    ]
    assert main(["check", *files, str(tmp_path / "none.json")]) == ExitCode.USAGE
    out = capsys.readouterr().out
    assert "differ: ps 0 is p:1 in the first and q:1 in the second" in out
    assert "none.json cannot be read" in out


@pytest.mark.parametrize("option", [["--role", "ps"], ["--reach"], ["--workers", "2"]])
def test_files_and_options_of_a_task_exclude_each_other(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", write(tmp_path / "ps.json", "ps"), *option]) == ExitCode.USAGE
    assert "FILES are compared with each other" in capsys.readouterr().err
