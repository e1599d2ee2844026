"""What a ps answers who reads its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np

from tests.coordination.parts import make_host
from tests.server.conftest import make_state
from zmqtrain.compute.arrays import Flat
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.server.parameters import ParameterAccess
from zmqtrain.wire.buffers import Tensor
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
