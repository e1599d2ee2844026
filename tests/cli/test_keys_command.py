"""`zmqtrain keys`: what it makes, shows and refuses."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.cli.main import main
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.protocol.status import Status
from zmqtrain.transport.keys import Owner, read_registry, read_secret
from zmqtrain.wire.messages import GetStatus


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "keys")


def owners(directory: str, *, revoked: bool = False) -> list[str]:
    return [str(e.owner) for e in read_registry(Path(directory)) if e.revoked is revoked]


def test_new_makes_a_key_for_every_task_and_for_people(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "--keys", directory, "--ps", "2", "--workers", "3"]) == 0
    everyone = ["ps 0", "ps 1", "chief 0", "worker 0", "worker 1", "worker 2", "client 0"]
    assert owners(directory) == everyone
    assert capsys.readouterr().out == (
        f"7 keys in {directory}: copy registry to every host, and to each host the "
        "*.secret files of its own tasks\n"
    )
    path = Path(directory)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert main(["keys", "new", "--keys", directory]) == ExitCode.USAGE
    assert "already has keys" in capsys.readouterr().err
    assert owners(directory) == everyone


def test_directory_is_that_of_the_variable_unless_a_flag_says_another(
    directory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "list"]) == ExitCode.USAGE
    assert "--keys (or ZMQTRAIN_KEYS) is not given" in capsys.readouterr().err
    monkeypatch.setenv("ZMQTRAIN_KEYS", directory)
    assert main(["keys", "new"]) == 0
    assert main(["keys", "new", "--keys", f"{directory}-2", "--workers", "2"]) == 0
    assert "worker 1" not in owners(directory)
    assert "worker 1" in owners(f"{directory}-2")


def test_key_made_on_one_host_is_allowed_on_another_by_its_public_half(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "add", "worker", "4", "--keys", f"{directory}-there"]) == 0
    public = capsys.readouterr().out.strip()
    assert main(["keys", "add", "worker", "4", "--keys", directory, "--public", public]) == 0
    assert capsys.readouterr().out.strip() == public
    (entry,) = read_registry(Path(directory))
    assert (entry.owner, entry.public) == (Owner("worker", 4), public)
    read_secret(Path(f"{directory}-there"), Owner("worker", 4))
    with pytest.raises(ConfigError):
        read_secret(Path(directory), Owner("worker", 4))


def test_revoked_key_stays_listed_and_its_secret_goes(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["keys", "new", "--keys", directory, "--workers", "2", "--clients", "0"])
    capsys.readouterr()
    assert main(["keys", "revoke", "worker", "1", "--keys", directory]) == 0
    revoked = read_registry(Path(directory))[-1].public
    assert capsys.readouterr().out == f"the key of worker 1 ({revoked}) is revoked\n"
    assert main(["keys", "add", "worker", "1", "--keys", directory]) == 0
    new = capsys.readouterr().out.strip()
    assert main(["keys", "list", "--keys", directory]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["task", "state", "secret", "public", "key"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["ps", "0", "allowed"], ["chief", "0", "allowed"], ["worker", "0", "allowed"],
    ]  # fmt: skip
    assert [line.split() for line in lines[4:]] == [
        ["worker", "1", "revoked", "-", revoked],
        ["worker", "1", "allowed", "here", new],
    ]
    assert main(["keys", "list", "--keys", directory, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["directory"] == directory
    assert shown["keys"][-1] == {
        "role": "worker", "index": 1, "revoked": False, "secret": True, "public": new,
    }  # fmt: skip


def test_nobody_but_the_chief_is_revoked_without_an_index(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["keys", "new", "--keys", directory])
    everyone = owners(directory)
    for role in "ps", "worker", "client":
        capsys.readouterr()
        assert main(["keys", "revoke", role, "--keys", directory]) == ExitCode.USAGE
        assert f"which {role} is meant is not said; expected its index" in capsys.readouterr().err
        read_secret(Path(directory), Owner(role))
    assert owners(directory) == everyone
    assert main(["keys", "revoke", "chief", "--keys", directory]) == ExitCode.OK
    assert owners(directory, revoked=True) == ["chief 0"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["add", "wizard"], "'wizard' is no role that has keys"),
        (["add", "worker", "-1"], "No such option"),
        (["add", "worker", "--public", "x"], "the public key 'x' is not 64 hexadecimal digits"),
        (["revoke", "ps", "7"], "has no allowed key of ps 7"),
        (["revoke", "chief", "1"], "expected 0, since there is one chief"),
        (["new", "--workers", "0"], "0 is not in the range"),
        (["list", "--keys", "/dev/null/x"], "cannot be read: Not a directory"),
        (["add", "worker", "--keys", "/dev/null/x"], "Not a directory; expected a"),
    ],
)
def test_wrong_usage_is_told_and_changes_nothing(
    arguments: list[str],
    complaint: str,
    directory: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ZMQTRAIN_KEYS", directory)
    main(["keys", "add", "ps"])
    assert main(["keys", *arguments]) == ExitCode.USAGE
    assert complaint in capsys.readouterr().err
    assert owners(directory) == ["ps 0"]


def test_question_is_asked_with_the_key_of_the_first_client(
    directory: str, ps: Any, training: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps.replies[GetStatus] = [training]
    main(["keys", "add", "client", "3", "--keys", directory])
    main(["keys", "add", "client", "12", "--keys", directory])
    assert main(["status", "--keys", directory]) == ExitCode.OK
    assert (ps.security.owner, ps.security.directory) == (Owner("client", 3), Path(directory))
    assert ps.security.servers == {"tcp://127.0.0.1:2222": Owner("ps", 0)}
    assert not ps.security.insecure
    monkeypatch.setenv("ZMQTRAIN_INSECURE", "1")
    assert main(["why"]) == ExitCode.OK
    assert (ps.security.directory, ps.security.insecure) == (None, True)
