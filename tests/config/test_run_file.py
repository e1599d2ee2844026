"""The files by which a job is found on its host: where they cannot be kept, and what is said."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.restarts import Restart
from zmqtrain.config.run_file import (
    RunningJob,
    end_since,
    forget_end,
    life,
    note_end,
    published,
    running_jobs,
)
from zmqtrain.errors import ConfigError, OccupiedError, PeerLostError


@pytest.fixture
def directory(tempdir: Path) -> Path:
    """Directory of this user's run files, which does not exist yet."""
    return tempdir / f"zmqtrain-{os.getuid()}"


def test_job_is_listed_while_it_runs(directory: Path) -> None:
    with published("job.py", ("a:1",), "ps 0"):
        (job,) = running_jobs()
        assert job == RunningJob(os.getpid(), "job.py", ("a:1",), "ps 0", began=job.began)
        assert time.time() - 60 < job.began <= time.time()
    assert running_jobs() == []


@pytest.mark.usefixtures("directory")
def test_task_without_a_restart_left_is_listed_with_the_job() -> None:
    with published("job.py", ("a:1",), "chief 0") as note:
        note("worker 0", Restart(0.1, left=1, regained_s=50.0))
        assert running_jobs()[0].spent == {}
        note("ps 0", Restart(0.1, left=0, regained_s=50.0))
        (job,) = running_jobs()
        assert set(job.spent) == {"ps 0"}
        assert 0 < job.spent["ps 0"] - time.time() <= 50.0


def test_job_is_listed_once_by_its_chief_or_else_by_its_ps(directory: Path) -> None:
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


TASK = Task(Role.WORKER, 1)


def killed(directory: Path, since: float) -> None:
    """Leave the record of a task whose process was killed."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with life(("a:1",), TASK):
        (path,) = directory.glob("*.life")
        text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | {"pid": process.pid, "since": since}))


def test_life_after_a_killed_one_counts_from_the_begin_of_that(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    killed(directory, 7.0)
    with life(("a:1",), Task(Role.WORKER, 2)) as of_another_task:
        assert of_another_task is None
    with life(("b:1",), TASK) as of_another_job:
        assert of_another_job is None
    with life(("a:1",), TASK) as since:
        assert since == 7.0
    with life(("a:1",), TASK) as since:
        assert since is None  # the one before ended in order
    assert not list(directory.glob("*.life"))


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (PeerLostError("gone"), True),
        (OccupiedError("taken"), True),
        (ConfigError("wrong"), False),
        (RuntimeError("a bug"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_life_that_ends_by_itself_is_the_last_unless_a_restart_may_help(
    directory: Path, error: BaseException, counts: bool
) -> None:
    directory.mkdir(mode=0o700)
    with pytest.raises(type(error)), life(("a:1",), TASK):
        raise error
    with life(("a:1",), TASK) as since:
        assert (since is not None) == counts


def test_second_process_of_a_task_leaves_the_record_of_the_first(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    parent = psutil.Process(os.getppid())
    with life(("a:1",), TASK):
        (path,) = directory.glob("*.life")
        of_parent = {"pid": parent.pid, "created": parent.create_time(), "since": 7.0}
        path.write_text(json.dumps(of_parent))
        with life(("a:1",), TASK) as since:
            assert since is None
        assert json.loads(path.read_text()) == of_parent


def test_forgotten_end_is_no_longer_noted(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    note_end(("a:1",), 0)
    forget_end(("b:1",))
    assert end_since(("a:1",), 0.0) == 0
    forget_end(("a:1",))
    forget_end(("a:1",))
    assert end_since(("a:1",), 0.0) is None


def test_missing_temporary_directory_is_reported_with_the_remedy(
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
        (link_to_a_directory, "is not a directory", "remove what is there, or set TMPDIR"),
    ],
)
def test_foreign_directory_for_small_files_is_reported_with_the_remedy(
    directory: Path, make: Callable[[Path], None], problem: str, remedy: str
) -> None:
    make(directory)
    with pytest.raises(ConfigError, match=f"^{directory} {problem}.*{remedy}$"):
        running_jobs()
    with pytest.raises(ConfigError, match=problem), published("job.py", ("a:1",), "ps 0"):
        pytest.fail("the job began")


def test_full_disk_is_reported_with_the_remedy_and_leaves_nothing(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    expected = (
        "cannot be written: File too large; expected room for a small file; free some space, or "
        "set TMPDIR"
    )
    with pytest.raises(ConfigError) as raised, _full_disk(), published("job.py", ("a:1",), "ps 0"):
        pytest.fail("the job began")
    assert str(raised.value) == f"{directory / str(os.getpid())}.json {expected}"
    assert not list(directory.iterdir())


@contextmanager
def _full_disk() -> Iterator[None]:
    """Let this process write nothing into files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
