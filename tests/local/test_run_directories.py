"""Directories of `zmqtrain run`: which are in use, and which are left over."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.local.run_directories import (
    PREFIX,
    ps_address,
    remove_dead_runs,
    remove_run,
    run_directories,
    run_directory,
)
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_files import file_name
from zmqtrain.store.segment_layout import SegmentLayout

pytestmark = pytest.mark.usefixtures("tempdir")


def test_directory_in_use_is_kept_and_goes_with_its_run(tempdir: Path) -> None:
    with run_directory() as path:
        (path / "ps-0.sock").touch()
        assert [(found.path, found.in_use) for found in run_directories(tempdir)] == [(path, True)]
        assert not remove_run(path)
        assert path.exists()
    assert not list(tempdir.iterdir())


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Another run looks at the first directory between its making and its locking."""
    make, held = tempfile.mkdtemp, list[int]()

    def made(**options: Any) -> str:
        path = make(**options)
        if not held:
            held.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            fcntl.flock(held[0], fcntl.LOCK_SH)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    return held


def test_run_keeps_its_directory_although_another_one_looks_at_it(
    tempdir: Path, looks: list[int]
) -> None:
    with run_directory() as path:
        os.close(looks[0])
        assert [(found.path, found.in_use) for found in run_directories(tempdir)] == [(path, True)]


def test_directory_at_which_another_process_looks_is_not_in_use(tempdir: Path) -> None:
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    assert [found.in_use for found in run_directories(tempdir)] == [False]
    os.close(descriptor)


def test_directory_whose_run_is_dead_is_found_and_removed(tempdir: Path) -> None:
    child = os.fork()
    if child == 0:
        with run_directory():
            os._exit(0)
    os.waitpid(child, 0)
    (left,) = run_directories(tempdir)
    assert not left.in_use
    assert remove_run(left.path)
    assert not list(tempdir.iterdir())


def dead_run(segments: Path) -> tuple[Path, Path]:
    """Leave what a killed run does; return its directory and the segment of its ps 1."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with run_directory() as path:
            segment = segments / file_name("ps 1", ps_address(path, 1))
            Segment.create(SegmentLayout(8, []), segment)
            os.write(writer, f"{path}\n{segment}".encode())
            os._exit(0)
    os.waitpid(child, 0)
    path, segment = map(Path, os.read(reader, 1000).decode().split("\n"))
    os.close(reader)
    os.close(writer)
    return path, segment


def test_next_run_removes_what_a_killed_one_left_and_nothing_of_others(tempdir: Path) -> None:
    segments = tempdir / "segments"
    path, segment = dead_run(segments)
    restarts = segments / file_name("ps 0", "127.0.0.1:2222")
    Segment.create(SegmentLayout(8, []), restarts).close()  # its ps may be started again
    with run_directory() as living:
        lives = Segment.create(
            SegmentLayout(8, []), segments / file_name("ps 0", ps_address(living, 0))
        )
        assert segment.exists()
        remove_dead_runs(segments)
        assert not path.exists()
        assert sorted(segments.iterdir()) == sorted([restarts, lives.path])
        lives.close()


def test_directory_of_a_killed_run_stays_as_long_as_its_ps_lives(tempdir: Path) -> None:
    segments = tempdir / "segments"
    path, segment = dead_run(segments)
    segment.unlink()
    ps = Segment.create(SegmentLayout(8, []), segment)  # it ends later than the run
    remove_dead_runs(segments)
    assert path.exists()
    assert segment.exists()
    ps.close()
    remove_dead_runs(segments)
    assert not path.exists()
    assert not segment.exists()


def test_what_is_no_directory_of_a_run_is_left_alone(tempdir: Path) -> None:
    (tempdir / "zmqtrain-other").mkdir()
    (tempdir / "zmqtrain-run-link").symlink_to(tempdir / "zmqtrain-other")
    assert list(run_directories(tempdir)) == []
    shutil.rmtree(tempdir / "zmqtrain-other")
    assert list(run_directories(tempdir)) == []
