"""Who may join, and as which life."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.actors.actor import Request
from zmqtrain.errors import FencedError, RefusedError
from zmqtrain.roles.peers import Peers
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import Join, Pull

LATER = 1 << 60  # than any clock says


def from_worker(message: Any, incarnation: int = 0) -> Request:
    nobody: Any = None
    return Request(nobody, nobody, b"", Envelope(message, Sender("worker", 0, incarnation)))


def join(nonce: str) -> Join:
    return Join(nonce, {}, "host:1", "", "")


def test_life_after_a_restored_checkpoint_comes_after_those_that_it_knows() -> None:
    peers = Peers(5.0, 1, lambda peer: False)
    peers.outlive(LATER)
    first = join("first/1")
    peer = peers.join(from_worker(first), first)
    assert peer is not None and peer.incarnation == LATER + 1
    with pytest.raises(FencedError, match="has not joined"):
        peers.member(from_worker(Pull(""), LATER))
    with pytest.raises(RefusedError, match="worker 0 has a newer life already"):
        peers.join(from_worker(join("first/2"), LATER), join("first/2"))
