"""Files that several tasks make together, in a directory where other users may write, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqtrain.data.files import one_task_at_a_time, write_whole
from zmqtrain.errors import DataError


def test_link_in_place_of_a_lock_is_refused_and_its_target_is_kept(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "index.lock").symlink_to(victim)
    with pytest.raises(DataError, match="cannot be made"), one_task_at_a_time(tmp_path / "index"):
        pytest.fail("it has the lock")
    assert victim.read_text() == "precious"


def test_link_in_place_of_a_draft_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "index"
    victim.write_text("precious")
    (tmp_path / "index.new").symlink_to(victim)
    write_whole(path, b"content")
    assert (victim.read_text(), path.read_bytes()) == ("precious", b"content")
    assert not path.is_symlink()


def test_lock_is_held_by_one_task_at_a_time_and_its_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "index"
    for _ in range(2):
        with one_task_at_a_time(path):
            assert path.with_name("index.lock").exists()
