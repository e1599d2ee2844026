"""What becomes of a ps's segment when the ps ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.errors import CheckpointError, OrphanedError, PeerLostError
from zmqtrain.server.shard_memory import close_or_keep
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import SegmentLayout
from zmqtrain.wire.messages import Shutdown

OVER = Shutdown(0, "step 10 of 10 is done")


@pytest.mark.parametrize(
    ("error", "shutdown", "is_kept"),
    [
        (None, None, True),
        (None, OVER, False),
        (PeerLostError("the leader is gone"), None, True),
        (RuntimeError("a bug"), None, True),
        (OrphanedError("no chief has ended the run"), None, False),
        (CheckpointError("there is nothing to go back to"), None, False),
    ],
    ids=["SIGTERM", "the end", "a lost peer", "a bug", "no chief", "no checkpoint"],
)
def test_segment_is_left_if_another_life_may_go_on_with_it_after(
    error: BaseException | None, shutdown: Shutdown | None, is_kept: bool, tmp_path: Path
) -> None:
    path = tmp_path / "segments" / "ps-0.segment"
    layout = SegmentLayout(4, [])
    ps: Any = SimpleNamespace(is_crash_safe=True, initialised=True, shutdown=shutdown)
    close_or_keep(ps, Segment.create(layout, path), error)
    left = Segment.adopt(layout, path)
    assert (left is not None) is is_kept
    if left is not None:
        left.remove()
