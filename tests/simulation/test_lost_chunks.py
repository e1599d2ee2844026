"""Gradients that travel in chunks, some of which are lost."""

from __future__ import annotations

import pytest

from simulation import stand_ins
from simulation.rules import drop
from tests.tales import calm, held
from zmqtrain.wire.messages import Chunk


@pytest.mark.parametrize("window_nbytes", [1200, 1 << 20], ids=["some chunks", "all chunks"])
@pytest.mark.parametrize("lost", [(1,), (5,), (2, 3, 6)])
def test_push_of_which_chunks_are_lost_is_sent_again(
    lost: tuple[int, ...], window_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_ins, "CREDITS_NBYTES", (window_nbytes,))
    rule = drop(Chunk, *lost, receiver="ps")
    report = held(calm(lane="tcp", in_chunks=True, workers=2, rules=(rule,)))
    assert report.matched > (max(lost),)
