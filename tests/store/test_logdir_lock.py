"""One job at a time saves into a logdir."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from zmqtrain.errors import ExitCode, OccupiedError
from zmqtrain.store.logdir import LOCK_FILE, claimed, is_claim_seen


def test_logdir_in_use_is_refused_with_the_process_that_uses_it(tmp_path: Path) -> None:
    logdir = str(tmp_path / "new")
    for _ in range(2):  # it is free again after the block
        with claimed(logdir):
            with pytest.raises(OccupiedError, match=r"runs already \(process \d+ on ") as raised:
                with claimed(logdir):
                    pytest.fail("two jobs save there")
            assert raised.value.exit_code == ExitCode.PEER_LOST  # worth another try


@pytest.fixture
def checking(tmp_path: Path) -> Iterator[int]:
    """A lock as a process has it for the moment in which it checks a claim."""
    with claimed(str(tmp_path)):
        pass
    descriptor = os.open(tmp_path / "checkpoints" / LOCK_FILE, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    yield descriptor
    os.close(descriptor)


def test_process_that_checks_a_claim_is_not_taken_for_the_chief(
    tmp_path: Path, checking: int
) -> None:
    assert not is_claim_seen(str(tmp_path / "checkpoints/made"))


def test_chief_waits_for_a_process_that_checks_the_claim(tmp_path: Path, checking: int) -> None:
    threading.Timer(0.02, fcntl.flock, (checking, fcntl.LOCK_UN)).start()
    with claimed(str(tmp_path)):
        assert is_claim_seen(str(tmp_path / "checkpoints/made"))


def test_logdir_that_cannot_be_made_is_left_to_whoever_writes_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with claimed(str(tmp_path / "file")), claimed(str(tmp_path / "file")):
        pass


def test_logdir_of_another_user_can_be_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock may be read only, where one may not write to it."""
    with claimed(str(tmp_path)):
        pass
    opened = os.open

    def refuse_writing(path: Path, mode: int, *rest: int) -> int:
        if mode & os.O_RDWR:
            raise PermissionError(13, "another user's", str(path))
        return opened(path, mode, *rest)

    monkeypatch.setattr(os, "open", refuse_writing)
    with claimed(str(tmp_path)):
        with pytest.raises(OccupiedError, match=r"runs already \(process \d+ on "):
            with claimed(str(tmp_path)):
                pytest.fail("two jobs save there")
        assert is_claim_seen(str(tmp_path / "checkpoints/made"))
    assert not is_claim_seen(str(tmp_path / "checkpoints/made"))


def test_file_system_without_locks_keeps_nobody_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claimed(str(tmp_path)), claimed(str(tmp_path)):
        assert not is_claim_seen(str(tmp_path / "checkpoints/made"))
        assert is_claim_seen("")  # there is no logdir
