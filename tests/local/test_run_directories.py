"""Directories of `zmqtrain run`: which are in use, and which are left over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from zmqtrain.local.run_directories import remove_run, run_directories, run_directory


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_directory_in_use_is_kept_and_goes_with_its_run(temporary: Path) -> None:
    with run_directory() as path:
        (path / "ps-0.sock").touch()
        assert [(found.path, found.in_use) for found in run_directories(temporary)] == [
            (path, True)
        ]
        assert not remove_run(path)
        assert path.exists()
    assert not list(temporary.iterdir())


def test_directory_whose_run_is_dead_is_found_and_removed(temporary: Path) -> None:
    child = os.fork()
    if child == 0:
        with run_directory():
            os._exit(0)
    os.waitpid(child, 0)
    (left,) = run_directories(temporary)
    assert not left.in_use
    assert remove_run(left.path)
    assert not list(temporary.iterdir())


def test_what_is_no_directory_of_a_run_is_left_alone(temporary: Path) -> None:
    (temporary / "zmqtrain-other").mkdir()
    (temporary / "zmqtrain-run-link").symlink_to(temporary / "zmqtrain-other")
    assert list(run_directories(temporary)) == []
    shutil.rmtree(temporary / "zmqtrain-other")
    assert list(run_directories(temporary)) == []
