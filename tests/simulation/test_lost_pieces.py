"""Gradients that travel in chunks, some of which are lost."""

from __future__ import annotations

import pytest

from simulation import stand_ins
from simulation.run import simulate
from tests.tales import calm
from zmqtrain.actors.actor import Request
from zmqtrain.server.receiver import Receiver
from zmqtrain.wire.messages import Chunk


@pytest.mark.parametrize("window_nbytes", [1200, 1 << 20], ids=["some chunks", "all chunks"])
@pytest.mark.parametrize("lost", [{0}, {4}, {1, 2, 5}])
def test_push_of_which_pieces_are_lost_is_sent_again(
    lost: set[int],
    window_nbytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take, came = Receiver._on_chunk, []

    def lose(receiver: Receiver, request: Request, chunk: Chunk) -> None:
        came.append(request)
        if len(came) - 1 not in lost:
            take(receiver, request, chunk)

    monkeypatch.setattr(stand_ins, "CREDITS_NBYTES", (window_nbytes,))
    monkeypatch.setattr(Receiver, "_on_chunk", lose)
    report = simulate(calm(lane="tcp", in_chunks=True, workers=2))
    assert not report.broken
    assert len(came) > max(lost)
