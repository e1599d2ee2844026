"""Directories in which a task keeps what others must not touch."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rights import needs_another_user
from zmqtrain.clusters import submitted
from zmqtrain.config.run_file import running_jobs
from zmqtrain.errors import ConfigError, SegmentError, ZmqTrainError
from zmqtrain.local.run_directories import run_directory
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import SegmentLayout
from zmqtrain.transport.curve import make_keys
from zmqtrain.transport.own_directory import make

REMEDY = "choose another"


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def temporary(tempdir: Path) -> Path:
    tempdir.chmod(0o1777)
    return tempdir


def a_run(place: Path) -> None:
    with run_directory() as path:
        path.rename(path.with_name("run"))
        path.mkdir()  # which it removes


def everything_below(place: Path) -> list[Path]:
    return sorted(place.rglob("*"))


@pytest.mark.parametrize(
    "use",
    [
        lambda place: make(place / "a" / "b", REMEDY),
        lambda place: running_jobs(),
        lambda place: make_keys(place / "etc" / "keys", {"ps": 1}),
        lambda place: Segment.create(SegmentLayout(8, []), place / "shm" / "ps-0.segment").close(),
        lambda place: submitted.write(place / "state" / "zmqtrain" / "job", {}),
        a_run,
    ],
    ids=["any", "run files", "keys", "segments", "submitted jobs", "a run"],
)
def test_files_of_a_task_are_private_under_any_umask(
    temporary: Path, use: Callable[[Path], object]
) -> None:
    use(temporary)
    found = everything_below(temporary)
    assert found
    assert [path for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


@needs_another_user
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_directory_that_another_user_made_first_is_not_used(temporary: Path, mode: int) -> None:
    place = temporary / f"zmqtrain-{os.geteuid()}"
    place.mkdir(mode)
    os.chown(place, 65534, 65534)
    with pytest.raises(ConfigError, match=r"another user's; .*TMPDIR"):
        running_jobs()
    with pytest.raises(ZmqTrainError, match="another user's; choose another"):
        make(place, REMEDY)
    assert not list(place.iterdir())


@needs_another_user
@pytest.mark.parametrize("what", ["file", "directory"])
def test_memory_that_another_user_laid_out_is_not_adopted(temporary: Path, what: str) -> None:
    path, layout = temporary / "shm" / "ps-0.segment", SegmentLayout(8, [])
    Segment.create(layout, path).close()
    os.chown(path if what == "file" else path.parent, 65534, 65534)
    with pytest.raises(SegmentError, match="another user's"):
        Segment.adopt(layout, path)


def test_directory_of_ours_that_others_may_write_to_is_not_used(temporary: Path) -> None:
    place = temporary / "shared"
    place.mkdir(0o777)
    with pytest.raises(ConfigError, match=r"open to other users \(mode 0777\)"):
        make(place, REMEDY)
