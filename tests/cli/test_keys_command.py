"""`zmqtrain keys`: what it makes, shows and refuses."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from tests.golden import Snapshot
from tests.transcript import performed
from zmqtrain.cli.main import main
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.protocol.status import Status
from zmqtrain.transport.keys import Owner, read_registry, read_secret
from zmqtrain.wire.control import GetStatus


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


def test_keys_are_added_listed_and_revoked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Snapshot,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = performed(capsys, "keys list")
    monkeypatch.setenv("ZMQTRAIN_KEYS", "keys")
    shown += performed(
        capsys,
        "keys new --workers 2 --clients 0",
        "keys new --keys other",
        "keys revoke worker 1",
        "keys add worker 1",
        "keys list",
        "keys list --json",
        "keys revoke ps",
        "keys revoke worker",
        "keys revoke chief",
    )
    snapshot(shown)
    assert {name.parent.name for name in tmp_path.rglob("ps-0.secret")} == {"keys", "other"}
    assert not (tmp_path / "keys" / "chief-0.secret").exists()


def test_wrong_usage_is_reported_and_changes_nothing(
    directory: str,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Snapshot,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ZMQTRAIN_KEYS", directory)
    main(["keys", "add", "ps"])
    commands = (
        "add wizard",
        "add worker --public x",
        "revoke ps 7",
        "revoke chief 1",
        "list --keys /dev/null/x",
        "add worker --keys /dev/null/x",
    )
    snapshot(performed(capsys, *(f"keys {command}" for command in commands)))
    assert owners(directory) == ["ps 0"]


def test_request_uses_the_key_of_the_first_client(
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
