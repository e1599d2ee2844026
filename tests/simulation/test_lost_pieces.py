"""Gradients that travel in pieces, some of which are lost."""

from __future__ import annotations

import pytest

from tests.tales import calm
from zmqtrain.actors.actor import Request
from zmqtrain.roles.intake import Intake
from zmqtrain.simulation import stand_ins
from zmqtrain.simulation.run import simulate
from zmqtrain.wire.messages import Piece


@pytest.mark.parametrize("credit_nbytes", [1200, 1 << 20], ids=["some pieces", "all pieces"])
@pytest.mark.parametrize("lost", [{0}, {4}, {1, 2, 5}])
def test_push_of_which_pieces_are_lost_is_sent_again(
    lost: set[int],
    credit_nbytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take, came = Intake._on_piece, []

    def lose(intake: Intake, request: Request, piece: Piece) -> None:
        came.append(request)
        if len(came) - 1 not in lost:
            take(intake, request, piece)

    monkeypatch.setattr(stand_ins, "CREDITS_NBYTES", (credit_nbytes,))
    monkeypatch.setattr(Intake, "_on_piece", lose)
    report = simulate(calm(lane="tcp", in_pieces=True, workers=2))
    assert not report.broken
    assert len(came) > max(lost)
