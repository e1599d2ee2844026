"""Answers of a ps to readers of its parameters, and to the end of their generation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest

from tests.asking import Asked
from tests.coordination.parts import add_peer, make_host
from tests.server.conftest import make_state
from zmqtrain.compute.arrays import Flat
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.errors import CheckpointError, FencedError
from zmqtrain.protocol.checkpoint import LastOrders, LedgerState, Saved
from zmqtrain.server.orphaned_shard import OrphanedShard
from zmqtrain.server.parameters import ParameterAccess
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.control import EndGeneration, HandOver
from zmqtrain.wire.messages import Parameters, Read


class AtRest:
    """A decider and an executor that have nothing under way."""

    def __init__(self) -> None:
        self.executor = self

    def at_rest(self, call: Callable[[], None]) -> None:
        call()

    after_orders = at_rest


class Reader:
    """A request whose answer is on its way until it is dropped."""

    def __init__(self) -> None:
        self.sent: tuple[Tensor, ...] = ()
        self.flat: list[float] = []

    def reply_with(self, message: Parameters, flat: Flat) -> None:
        self.sent = (Tensor.of(flat),)
        self.flat, self.copy = flat.tolist(), ref(flat)

    @property
    def memory(self) -> int:
        return np.frombuffer(self.sent[0].parts[0], np.uint8).ctypes.data


def test_readers_of_one_version_share_a_copy_which_no_update_changes(peers: PeerTable) -> None:
    state, rest = make_state(moving_average=0.5), AtRest()
    parts: Any = rest
    access = ParameterAccess(make_host(), state, peers, parts)

    def read(**fields: Any) -> Reader:
        reader: Any = Reader()
        access.on_read(reader, Read(**fields))
        return reader

    first, second = read(), read()
    assert first.memory == second.memory
    assert read(average=True).memory != first.memory
    size = state.shard.layout.size
    state.shard.initialize(np.ones(size, np.float32), version=1)
    later = read()
    assert later.memory != first.memory
    assert (first.flat, later.flat) == ([0.0] * size, [1.0] * size)
    assert not first.sent[0].array().any()


def test_copy_is_freed_once_it_is_sent(peers: PeerTable) -> None:
    parts: Any = AtRest()
    access = ParameterAccess(make_host(), make_state(), peers, parts)
    reader: Any = Reader()
    access.on_read(reader, Read())
    assert reader.copy() is not None
    reader.sent = ()
    assert reader.copy() is None


CHIEF = "chief 0"
LAST = LastOrders(1, 1, (), Saved(0, "sync-replicas", LedgerState(0, (), 0)))


class Ending(AtRest):
    """A decider whose shard may be handed over, unless others hold no copies."""

    def __init__(self, orphan: OrphanedShard | None) -> None:
        super().__init__()
        self.over, self.orphan = False, lambda: orphan

    def forget_orders(self, *, further: bool) -> None:
        self.over = further


def ended(
    peers: PeerTable, orphan: Any, generation: int = 1, begun: int = 1
) -> tuple[ParameterAccess, Asked, Any]:
    """Let the chief end a generation at a ps that has begun one."""
    add_peer(peers, CHIEF)
    rest: Any = Ending(orphan)
    state = make_state()
    state.generation = begun
    access = ParameterAccess(make_host(), state, peers, rest)
    request = Asked(sender=CHIEF, incarnation=1)
    access.on_end_generation(request, EndGeneration(generation))
    return access, request, rest


def test_ps_whose_generation_ends_carries_out_no_more_and_tells_its_last_orders(
    peers: PeerTable,
) -> None:
    orphan = SimpleNamespace(last=LAST)
    access, request, rest = ended(peers, orphan)
    access.on_end_generation(request, EndGeneration(1))  # once more
    assert request.replies == [LAST, LAST]
    assert access.remains is orphan
    assert rest.over


@pytest.mark.parametrize(("copies", "generation", "begun"), [(1, 1, 1), (2, 2, 1), (2, 0, 0)])
def test_ps_without_copies_or_of_another_generation_or_of_none_hands_nothing_over(
    peers: PeerTable, copies: int, generation: int, begun: int
) -> None:
    orphan = SimpleNamespace(last=LAST) if copies > 1 else None
    access, request, _ = ended(peers, orphan, generation, begun)
    assert isinstance(request.refusal, CheckpointError)
    with pytest.raises(CheckpointError, match="ps 0 has not ended its generation"):
        access.on_hand_over(request, HandOver("step-1.tmp-0", (0, 1), LAST))


def test_generation_is_not_ended_by_a_chief_of_an_earlier_life(peers: PeerTable) -> None:
    access, _, _ = ended(peers, SimpleNamespace(last=LAST))
    with pytest.raises(FencedError):
        access.on_end_generation(Asked(sender=CHIEF, incarnation=7), EndGeneration(1))
    with pytest.raises(FencedError):
        access.on_hand_over(Asked(sender=CHIEF), HandOver("step-1.tmp-0", (0, 1), LAST))
