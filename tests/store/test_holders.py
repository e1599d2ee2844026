"""Writers of a segment's gradients, and the locks that name them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zmqtrain.errors import SegmentError
from zmqtrain.store.locks import owned_and_held
from zmqtrain.store.segment import Segment, reach
from zmqtrain.store.segment_layout import SegmentLayout


def test_gradient_is_held_for_as_long_as_whoever_reached_it_lives() -> None:
    """So a worker that was taken for dead writes to no gradient that another was given."""
    layout = SegmentLayout(8, [])
    segment = Segment.private(layout)
    one, other = (reach(segment.name, layout) for _ in range(2))
    assert not segment.is_held(0)
    one.gradient(0)[:] = 1.0
    assert one.gradient(0)[0] == segment.gradient(0)[0] == 1.0
    assert segment.is_held(0)
    with pytest.raises(SegmentError, match="gradient 0 is held by another task"):
        other.gradient(0)
    del one
    assert not segment.is_held(0)
    other.gradient(0)
    assert segment.is_held(0)


@contextmanager
def child() -> Iterator[None]:
    """Fork a process that outlives what this one does meanwhile."""
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(there, b"!")
        signal.pause()
    try:
        os.read(here, 1)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(here)
        os.close(there)


def test_child_holds_no_lock_of_its_parent(tmp_path: Path) -> None:
    """Else a task that died would seem to live for as long as a process that reads its data."""
    tmp_path.chmod(0o700)
    layout, path = SegmentLayout(8, []), tmp_path / "segment"
    segment = Segment.create(layout, path)
    segment.gradient(0)
    worker = reach(str(path), layout)
    gradient = worker.gradient(0)
    with child():
        assert segment.is_held(0)
        del gradient, worker
        assert not segment.is_held(0)
        assert owned_and_held(path) == (True, False)
        segment.close()
        assert owned_and_held(path) == (False, False)


@pytest.mark.parametrize("name", [False, True])
def test_segment_that_has_lost_its_name_is_written_to_by_nobody_new(
    tmp_path: Path, name: bool
) -> None:
    tmp_path.chmod(0o700)
    layout, path = SegmentLayout(8, []), tmp_path / "segment"
    segment = Segment.create(layout, path)
    segment.gradient(0)
    worker = reach(str(path), layout)
    path.unlink()
    if name:
        path.touch(0o600)
    with pytest.raises(SegmentError):
        worker.gradient(0)
