"""Where a ps has its segment, and what becomes of it when the ps ends."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import CheckpointError, OrphanedError, PeerLostError, SegmentError
from zmqtrain.server.shard_memory import close_or_remove, may_go_on, open_segment
from zmqtrain.store import segment_files
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import SegmentLayout


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
    board: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment_files, "SHARED_MEMORY", tmp_path / "nowhere")
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
