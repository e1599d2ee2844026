"""Place of a ps's segment, and its fate when the ps ends."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from tests.constants import Constants
from tests.plans import planned
from tests.recommenders import DIM, make_job
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import CheckpointError, OrphanedError, PeerLostError, SegmentError
from zmqtrain.models.tables import RowsOf
from zmqtrain.protocol.orders import Apply
from zmqtrain.server.shard_memory import close_or_remove, may_go_on, open_segment, open_shard
from zmqtrain.store import segment_files
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_files import file_name, tables_directory
from zmqtrain.store.segment_layout import GENERATION, SegmentLayout
from zmqtrain.store.shard import Shard

PS = ("ipc://memory/0",)


@pytest.mark.parametrize(
    ("error", "is_over", "goes_on"),
    [
        (None, False, True),
        (None, True, False),
        (PeerLostError("the leader is gone"), False, True),
        (RuntimeError("a bug"), False, True),
        (OrphanedError("no chief has ended the run"), False, False),
        (CheckpointError("there is nothing to go back to"), False, False),
    ],
    ids=["SIGTERM", "the end", "a lost peer", "a bug", "no chief", "no checkpoint"],
)
def test_another_life_may_go_on_unless_the_job_is_over_or_given_up(
    error: BaseException | None, is_over: bool, goes_on: bool
) -> None:
    assert may_go_on(error, is_over=is_over) is goes_on


@pytest.mark.parametrize("board", [True, False])
def test_shared_memory_without_room_ends_a_ps_whose_workers_need_it(
    board: bool, tmp_path: Path, constants: Constants, caplog: pytest.LogCaptureFixture
) -> None:
    constants(segment_files, SHARED_MEMORY=tmp_path / "nowhere")
    ps = ("ipc://nowhere",)
    config = TaskConfig(role=Role.PS, job="job", index=0, ps=ps, workers=2)
    with pytest.raises(SegmentError, match="direct") if board else nullcontext():
        segment, is_left = open_segment(
            SegmentLayout(4, []), ps[0], config, safe=True, digest=1, is_board=board
        )
        assert (segment.path, is_left) == (None, False)
        assert "/dev/shm" in caplog.text and "--segment-dir" in caplog.text


@pytest.mark.parametrize("keep", [True, False])
def test_segment_is_left_if_it_is_to_be_kept(keep: bool, tmp_path: Path) -> None:
    path = tmp_path / "segments" / "ps-0.segment"
    layout = SegmentLayout(4, [])
    close_or_remove(Segment.create(layout, path), keep=keep)
    left = Segment.adopt(layout, path)
    assert (left is not None) is keep
    if left is not None:
        left.remove()


def with_tables(directory: Path) -> tuple[Shard, bool]:
    job = make_job()
    config = TaskConfig(role=Role.PS, job="job", index=0, ps=PS, segment_dir=str(directory))
    return open_shard(config, planned(job), PS[0], {})


def test_segment_without_room_for_its_tables_is_not_left(tmp_path: Path) -> None:
    directory = tmp_path / "segments"
    directory.mkdir(0o700)
    path = directory / file_name("ps 0", PS[0])
    tables_directory(path).symlink_to("nowhere")  # where a directory would have to be
    with pytest.raises(SegmentError):
        with_tables(directory)
    assert not path.exists()


@pytest.mark.parametrize("are_gone", [False, True])
def test_tables_are_taken_over_with_their_segment_or_neither_is(
    are_gone: bool, tmp_path: Path
) -> None:
    shard, is_left = with_tables(tmp_path / "segments")
    assert not is_left and shard.tables is not None
    shard.initialize(shard.parameters)
    shard.segment.words[GENERATION] = 1
    rows = RowsOf(0, np.array([5], np.int64), np.ones((1, DIM), np.float32))
    shard.segment.gradient(0)[:] = 0
    shard.tables.memory.buffer(0).write([rows])
    shard.stage(0, 0)
    shard.carry_out(Apply(0))
    trained = shard.tables.rows(0, rows.ids)
    close_or_remove(shard.segment, shard.tables.memory, keep=True)
    assert shard.segment.path is not None
    if are_gone:
        shutil.rmtree(tables_directory(shard.segment.path))
    after, is_left = with_tables(tmp_path / "segments")
    assert is_left is not are_gone and after.tables is not None
    assert after.version == int(not are_gone)
    initial = make_job().table_variables()[0].initial_rows(rows.ids)
    expected = initial if are_gone else trained
    np.testing.assert_array_equal(after.tables.rows(0, rows.ids), expected)
    close_or_remove(after.segment, after.tables.memory, keep=False)
    assert not [*(tmp_path / "segments").iterdir()]
