"""The files by which a job is found on its host: where they cannot be kept, and what is said."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest

from zmqtrain.config.run_file import RunningJob, end_since, note_end, published, running_jobs
from zmqtrain.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's run files are; it is not made yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"zmqtrain-{os.getuid()}"


def test_job_is_known_for_as_long_as_it_runs(directory: Path) -> None:
    with published("job.py", ("a:1",), "ps 0"):
        assert running_jobs() == [RunningJob(os.getpid(), "job.py", ("a:1",), "ps 0")]
    assert running_jobs() == []


def test_job_is_known_once_by_its_chief_or_else_by_its_ps(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    parent = os.getppid()  # a process that lives
    of_ps = RunningJob(parent, "job.py", ("a:1",), "ps 0")
    (directory / f"{parent}.json").write_text(json.dumps(asdict(of_ps)))
    with published("job.py", ("a:1",), "chief 0"):
        assert [(job.ps, job.task) for job in running_jobs()] == [(("a:1",), "chief 0")]
    assert running_jobs() == [of_ps]


def test_end_can_be_noted_by_several_tasks_at_once(directory: Path) -> None:
    note_end(("a:1",), 1)
    (note,) = directory.iterdir()
    with note.open("r+") as other:
        note_end(("a:1",), 0)
        other.write(" " * 1000 + "}")
    assert end_since(("a:1",), 0.0) == 0


def test_no_directory_for_small_files_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nowhere = Mock(side_effect=FileNotFoundError(errno.ENOENT, "No usable temporary directory"))
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(ConfigError, match=r"^No usable temporary directory; set TMPDIR"):
        running_jobs()


def test_file_of_a_dead_task_is_removed_when_the_next_begins(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    with subprocess.Popen(["true"]) as process:
        process.wait()
    left = directory / f"{process.pid}.json"
    left.write_text(json.dumps(asdict(RunningJob(process.pid, "job.py", ("a:1",), "chief 0"))))
    with published("job.py", ("a:1",), "chief 0"):
        assert not left.exists()


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def link_to_a_directory(path: Path) -> None:
    path.symlink_to(path.parent)


@pytest.mark.parametrize(
    ("make", "problem", "remedy"),
    [
        (Path.touch, "cannot be made: File exists", "remove what is there, or set TMPDIR"),
        (link_to_nothing, "cannot be made: File exists", "remove what is there, or set TMPDIR"),
        (link_to_a_directory, "is no directory, a link", "remove what is there, or set TMPDIR"),
    ],
)
def test_directory_that_cannot_be_ours_is_told_with_the_remedy(
    directory: Path, make: Callable[[Path], None], problem: str, remedy: str
) -> None:
    make(directory)
    with pytest.raises(ConfigError, match=f"^{directory} {problem}.*{remedy}$"):
        running_jobs()
    with pytest.raises(ConfigError, match=problem), published("job.py", ("a:1",), "ps 0"):
        pytest.fail("the job began")


def test_full_disk_is_told_with_the_remedy_and_leaves_nothing(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    path = directory / f"{os.getpid()}.json"
    path.with_suffix(f".{os.getpid()}").symlink_to("/dev/full")
    expected = (
        "No space left on device; expected room for a small file; free some space, or set TMPDIR"
    )
    with pytest.raises(ConfigError) as raised, published("job.py", ("a:1",), "ps 0"):
        pytest.fail("the job began")
    assert str(raised.value) == f"{path} cannot be written: {expected}"
    assert not list(directory.iterdir())
