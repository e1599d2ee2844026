"""Removal of segments that nobody needs, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rights import no_root
from zmqtrain.errors import SegmentError
from zmqtrain.models.tables import TableVariable, Uniform
from zmqtrain.store import locks
from zmqtrain.store.segment import Segment, reach
from zmqtrain.store.segment_files import file_name, remove_dead, segment_files, tables_directory
from zmqtrain.store.segment_layout import SegmentLayout
from zmqtrain.store.table_layout import TableLayout
from zmqtrain.store.table_memory import TableMemory

NAME = file_name("ps 0", "127.0.0.1:2222")


def test_segment_of_a_dead_ps_is_removed_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "segments" / NAME
    segment = Segment.create(SegmentLayout(8, []), path)
    assert not remove_dead(path)
    assert path.exists()
    segment.close()
    assert remove_dead(path)
    assert not path.exists()


def test_segment_that_is_closed_twice_leaves_other_locks_alone(tmp_path: Path) -> None:
    """The second lock gets the number of the first one's descriptor."""
    first = Segment.create(SegmentLayout(8, []), tmp_path / "own" / NAME)
    first.close()
    second = Segment.create(SegmentLayout(8, []), tmp_path / "other" / NAME)
    first.close()
    assert locks.owned_and_held(tmp_path / "other" / NAME)[0]
    second.close()


def test_tables_of_a_segment_count_with_it_and_go_with_it(tmp_path: Path) -> None:
    path = tmp_path / "segments" / NAME
    segment = Segment.create(SegmentLayout(8, []), path)
    variable = TableVariable("t", 0, 4, None, Uniform())
    TableMemory.create([TableLayout(variable)], tables_directory(path)).close()
    segment.close()
    (found,) = segment_files(path.parent)
    assert found.nbytes > 512 * path.stat().st_blocks
    assert remove_dead(path)
    assert not [*path.parent.iterdir()]


def test_segment_of_a_dead_ps_stays_as_long_as_a_worker_may_wait_for_its_next_life(
    tmp_path: Path,
) -> None:
    path, layout = tmp_path / "segments" / NAME, SegmentLayout(8, [])
    segment = Segment.create(layout, path)
    worker = reach(segment.name, layout)
    segment.gradient(0)
    gradient = worker.gradient(0)
    segment.close()
    (found,) = segment_files(path.parent)
    assert (found.owned, found.held, remove_dead(path)) == (False, True, False)
    del worker, gradient
    (found,) = segment_files(path.parent)
    assert (found.owned, found.held, remove_dead(path)) == (False, False, True)


def nothing(place: Path) -> None:
    pass


def below_a_file(place: Path) -> None:
    place.parent.rmdir()
    place.parent.touch()


def link_to_itself(place: Path) -> None:
    place.symlink_to(place)


@pytest.mark.parametrize("make", [nothing, below_a_file, link_to_itself, Path.mkdir, Path.touch])
def test_what_is_no_segment_is_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    directory = tmp_path / "segments"
    directory.mkdir()
    path = directory / NAME
    make(path)
    before = sorted(tmp_path.rglob("*"))
    assert not remove_dead(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_segments_are_listed_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "segments"
    paths = [directory / file_name(f"ps {index}", "127.0.0.1:2222") for index in range(2)]
    for path in paths:
        Segment.create(SegmentLayout(8, []), path).close()
    (directory / "other.segment").write_bytes(b"of somebody else")
    assert [found.path for found in segment_files(directory)] == paths
    paths[0].rename(directory / f"{paths[0].name}.old")
    paths[0].symlink_to(directory / "gone")
    assert [found.path for found in segment_files(directory)] == paths[1:]


def test_segment_in_a_directory_that_is_closed_to_us_stays(tmp_path: Path) -> None:
    directory = tmp_path / "segments"
    path = directory / NAME
    Segment.create(SegmentLayout(8, []), path).close()
    for mode in 0o000, 0o500:  # neither searched, nor written to
        directory.chmod(mode)
        with no_root():
            assert not remove_dead(path)
    directory.chmod(0o700)
    assert path.exists()


WRITABLE = (
    "expected a directory that this user can write; correct --segment-dir (or ZMQTRAIN_SEGMENT_DIR)"
)


def file_in_its_place(place: Path) -> None:
    place.touch()


def link_in_its_place(place: Path) -> None:
    place.symlink_to(place.parent)


def open_to_others(place: Path) -> None:
    place.mkdir()
    place.chmod(0o755)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (file_in_its_place, f"cannot be made: File exists; {WRITABLE}"),
        (link_in_its_place, f"is not a directory, or is a link or another user's; {WRITABLE}"),
        (open_to_others, "is open to other users (mode 0755); expected mode 0700; chmod 700 it"),
    ],
)
def test_directory_that_is_not_ours_alone_gets_no_segment(
    tmp_path: Path, make: Callable[[Path], None], complaint: str
) -> None:
    directory = tmp_path / "segments"
    make(directory)
    with pytest.raises(SegmentError) as raised:
        Segment.create(SegmentLayout(8, []), directory / NAME)
    assert str(raised.value) == f"{directory} {complaint}"


def test_segment_below_a_file_is_told_with_the_option_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file" / NAME
    path.parent.touch()
    with pytest.raises(SegmentError) as raised:
        Segment.adopt(SegmentLayout(8, []), path)
    assert str(raised.value) == f"{path} cannot be opened: Not a directory; {WRITABLE}"
