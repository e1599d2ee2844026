"""Jobs on hosts with a shell: their scripts, and `zmqtrain submit --on ssh` with a stand-in ssh."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clusters.conftest import Kubectl, said
from tests.clusters.examples import JOB, ROOT, example_plan
from tests.harness import until
from zmqtrain.cli.main import main
from zmqtrain.clusters.hosts import keyed, placed, problem, render
from zmqtrain.clusters.submission import SshHost, Submission, hosts_of
from zmqtrain.clusters.submitted import submitted_jobs
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.wire.messages import PROTOCOL_VERSION

A, B = SshHost("a", 2, "10.0.0.1"), SshHost("me@b", 2, "10.0.0.2")
SUBMIT = ("submit", str(ROOT / JOB), "--on", "ssh", "--name", "digits", "--ps-memory", "1Gi")


def test_hosts_are_read_with_their_slots() -> None:
    assert hosts_of("a:2, me@b") == (SshHost("a", 2), SshHost("me@b", 1))


@pytest.mark.parametrize("text", ["", "a,", "a,a:2", "a:0", "a:b", "-oProxyCommand=x", "a b"])
def test_wrong_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        hosts_of(text)


def test_number_of_workers_defaults_to_the_slots() -> None:
    asked = {"on": "ssh", "hosts": "a:2,b:3"}
    assert Submission.model_validate(asked).workers == 5
    assert Submission.model_validate(asked | {"workers": 1}).workers == 1


def test_every_task_has_one_host_and_no_host_more_workers_than_slots() -> None:
    where = placed([A, B], ps=3, workers=4)
    names = {host.login: [t.hyphenated for t in where if where[t] == host] for host in (A, B)}
    assert names["a"] == ["ps-0", "ps-2", "chief-0", "worker-0", "worker-1"]
    assert names["me@b"] == ["ps-1", "worker-2", "worker-3"]
    with pytest.raises(ConfigError):
        placed([A, B], ps=1, workers=5)


def test_host_gets_the_keys_of_its_own_tasks_alone() -> None:
    plan = example_plan()
    scripts = keyed(dict.fromkeys([A, B], ""), plan, plan.keys).values()
    on_a, on_b = (
        {name for name, text in plan.keys.items() if text in script} for script in scripts
    )
    assert on_a & on_b == {"registry"}
    assert on_b == {"registry", "ps-1.secret", "worker-2.secret", "worker-3.secret"}
    assert on_a | on_b == set(plan.keys) - {"client-0.secret"}


def test_host_of_worker_0_has_the_key_of_the_chief_that_it_hosts() -> None:
    plan = replace(example_plan(), ps=0)
    keys = {name: text for name, text in plan.keys.items() if not name.startswith("ps")}
    scripts = keyed(dict.fromkeys([A, B], ""), plan, keys)
    assert ["chief-0.secret" in script for script in scripts.values()] == [True, False]


def test_host_without_secrets_has_a_script_that_runs() -> None:
    """Its keys are revoked, or it has no task."""
    plan = example_plan()
    for script in keyed(render(plan, [A, B]), plan, {"registry": "r"}).values():
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)


def test_address_that_peers_do_not_reach_is_refused() -> None:
    with pytest.raises(ConfigError):
        render(example_plan(), [SshHost("localhost", 2, "127.0.0.1"), B])


def test_workers_of_a_host_have_gpus_of_their_own() -> None:
    _, script = render(example_plan(gpu=2), [A, B]).values()
    lines = [line.strip() for line in script.splitlines() if "CUDA" in line]
    assert lines == [f"export CUDA_VISIBLE_DEVICES={devices}" for devices in ("0,1", "2,3")]


@pytest.mark.parametrize(
    "facts, found",
    [
        (f"job 12\nprotocol {PROTOCOL_VERSION}", ""),
        (f"protocol {PROTOCOL_VERSION}", "copy"),
        (f"job 34\nprotocol {PROTOCOL_VERSION}", "copy"),
        ("job 12\nprotocol 1", "version"),
        (f"cpus 2\njob 12\nprotocol {PROTOCOL_VERSION}", "--ps-cpu"),
        (f"cpus 64\njob 12\nprotocol {PROTOCOL_VERSION}", ""),
        ("job 12\nsh: 1: python3: not found", "--python"),
        ("job 12\nModuleNotFoundError: No module named 'zmqtrain'", "--python"),
        ("directory /work\nprotocol 1", "/work"),
        ("tools\nprotocol 1", "util-linux"),
        ("taken /home/me/x\nprotocol 1", "--name"),
        ("", "zmqtrain"),
    ],
)
def test_problem_of_a_host_is_reported(facts: str, found: str) -> None:
    said = problem(facts, "12", cpu=64)
    assert found in said and bool(found) == bool(said)


class Shell:
    """This machine as a host: a script is run by its shell, with a command in place of Python."""

    def __init__(self, directory: Path, python: str) -> None:
        self.home = directory / "home"
        plan = replace(
            example_plan(workers=2, max_workers=3),
            ps=1,
            python=str(directory / "python"),
            working=str(directory),
        )
        (directory / "python").write_text(f"#!/bin/sh\n{python}\n")
        (directory / "python").chmod(0o755)
        scripts = render(plan, [SshHost("a", 3, "10.0.0.1")])
        (self.script,) = keyed(scripts, plan, plan.keys).values()

    def __call__(self, *verb: str) -> list[str]:
        done = subprocess.run(
            ["sh", "-s", "--", *verb],
            input=self.script,
            capture_output=True,
            text=True,
            check=True,
            env={"HOME": str(self.home), "PATH": os.environ["PATH"]},
        )
        assert not done.stderr
        return done.stdout.splitlines()

    def file(self, name: str) -> Path:
        return self.home / ".local/state/zmqtrain-hosts/digits/a" / name


ALL = {"ps-0", "chief-0", "worker-0", "worker-1"}


def test_script_reports_facts_about_the_host(tmp_path: Path) -> None:
    facts = dict(line.split(" ", 1) for line in Shell(tmp_path, "echo protocol 7")("check"))
    assert facts == {"cpus": str(os.cpu_count()), "protocol": "7"}


def test_script_starts_missing_tasks_and_ends_running_ones(tmp_path: Path) -> None:
    host = Shell(tmp_path, 'echo "$@"; exec sleep 600')
    assert host("state") == []
    host("start", "2")
    try:
        assert set(host("state")) == {f"{name} running" for name in ALL}
        before = {name: host.file(f"{name}.pid").read_text() for name in ALL}
        host("start", "3")
        assert {name: host.file(f"{name}.pid").read_text() for name in ALL} == before
        assert len(host("state")) == len(ALL) + 1
        assert {p.stat().st_mode & 0o777 for p in host.file("keys").iterdir()} == {0o600}
        host("start", "1")
        assert set(host("state")) == {f"{name} running" for name in ALL - {"worker-1"}}
    finally:
        host("end")
    assert host("state") == [] and not host.file("").exists()


def test_script_reports_how_a_task_ended_and_restarts_it(tmp_path: Path) -> None:
    host = Shell(tmp_path, "exit 77")
    host("start", "2")
    ended = {f"{name} 77" for name in ALL}
    for _ in range(2):
        until(lambda: set(host("state")) == ended, "the end of all", lambda: str(host("state")))
        for name in ALL:
            host.file(f"{name}.code").unlink()
        host("start", "2")
    host("end")


ADDRESS = said("hostname 10.0.0.1\nport 22\n", "-G")


def test_secrets_are_in_no_command_line_and_print_asks_no_host(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = f"cpus 1\nprotocol {PROTOCOL_VERSION}\njob {digest()}\n"
    kubectl.answers(ADDRESS, said(facts))
    assert main([*SUBMIT, "--hosts", "a:2", "--print"]) == ExitCode.OK
    assert "--role worker --index 1" in capsys.readouterr().out
    assert all("-G" in words for words, _ in kubectl.calls("--"))
    assert main([*SUBMIT, "--hosts", "a:2"]) == ExitCode.OK
    (job,) = submitted_jobs()
    assert (job.workers, job.context) == (2, "a:2")
    secrets = [path.read_text().strip() for path in Path(job.keys).glob("*.secret")]
    words = " ".join(" ".join(words) for words, _ in kubectl.calls("--"))
    assert "sh -s -- start 2" in words
    assert not any(secret in words + capsys.readouterr().out for secret in secrets)
    assert job.directory.stat().st_mode & 0o077 == 0


def digest() -> str:
    program = ["sha256sum", str(ROOT / JOB)]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()[0]


def test_host_shows_what_the_chief_wrote_at_its_end(tmp_path: Path) -> None:
    host = Shell(tmp_path, 'case "$*" in *chief*) echo over >"$ZMQTRAIN_ENDED_FILE" ;; esac')
    assert host("ended") == []
    try:
        host("start", "2")
        until(lambda: host("ended") == ["over"], "the end of the chief", lambda: str(host("state")))
    finally:
        host("end")
    assert host("ended") == []
