"""Large tensors in chunks: whatever is cut is put together again, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chunk_sizes import chunks_of
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.chunks import Chunks, Flat, as_it_is, at, count, split, take_in
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import Chunk, Message, Push

PUSH = Push(3, 0, 7, 32, 0.5)


def values(size: int) -> Flat:
    return np.random.default_rng(size).standard_normal(size, np.float32)


def received(message: Message, tensors: tuple[Tensor, ...]) -> Envelope:
    """Return what a peer gets of a message: no view of ours."""
    frames = encode(Envelope(message, Sender("worker", 0, 1), 9, 1, tensors))
    return decode([bytes(frame) for frame in frames])


@pytest.fixture
def small_chunks() -> Iterator[None]:
    with chunks_of(7):
        yield


@settings(max_examples=200)
@given(size=st.integers(0, 60), chunk_size=st.integers(1, 20), data=st.data())
def test_flat_of_any_size_arrives_whole_in_any_order(
    size: int, chunk_size: int, data: st.DataObject
) -> None:
    flat, out = values(size), np.full(size, np.nan, np.float32)
    with chunks_of(chunk_size):
        ahead, tensors = split(flat, sequence=3)
        assert (ahead is None) == bool(tensors) == (size <= chunk_size)
        if ahead is None:
            take_in(received(PUSH, tensors).tensors, out)
        else:
            assert len(ahead) == count(size)
            arrived = [received(*chunk) for chunk in ahead]
            for envelope in data.draw(st.permutations(arrived)):
                assert isinstance(envelope.message, Chunk)
                assert envelope.message.sequence == 3
                take_in(envelope.tensors, at(out, envelope.message.index))
    assert out.tobytes() == flat.tobytes()


@settings(max_examples=200)
@given(size=st.integers(0, 60), chunk_size=st.integers(1, 20))
def test_chunks_are_views_that_follow_one_another_and_only_the_last_is_smaller(
    size: int, chunk_size: int
) -> None:
    flat = values(size)
    with chunks_of(chunk_size):
        parts = [at(flat, index) for index in range(count(size))]
    assert b"".join(part.tobytes() for part in parts) == flat.tobytes()
    assert {len(part) for part in parts[:-1]} <= {chunk_size}
    assert 0 < len(parts[-1]) <= chunk_size or size == 0
    assert all(np.shares_memory(part, flat) for part in parts if size)


@pytest.mark.parametrize("index", [-1, 3, 1 << 62, -(1 << 62)])
def test_chunk_beyond_the_flat_is_refused(small_chunks: None, index: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        at(values(20), index)
    assert str(caught.value) == f"chunk {index} of 3"


@pytest.mark.parametrize(
    "tensors",
    [
        (),
        2 * (Tensor.of(values(4)),),
        (Tensor.of(values(3)),),
        (Tensor.of(values(5)),),
        (Tensor.of(values(4).reshape(2, 2)),),
        (Tensor.of(np.zeros(4, np.int32)),),
    ],
)
def test_tensors_that_are_no_piece_change_nothing(tensors: tuple[Tensor, ...]) -> None:
    out = np.zeros(4, np.float32)
    with pytest.raises(ProtocolError):
        take_in(tensors, out)
    assert not out.any()


def test_chunk_is_encoded_when_it_is_first_sent_and_never_again(small_chunks: None) -> None:
    """What a compression keeps for the next gradient must not be kept twice."""
    flat, encoded = values(20), []

    def halved(start: int, chunk: Flat) -> tuple[Tensor, ...]:
        encoded.append((start, len(chunk)))
        return (Tensor.of(chunk / 2), Tensor.of(chunk[:1]))

    ahead, tensors = split(flat, 3, halved)
    assert (tensors, encoded) == ((), [])
    assert ahead is not None
    first = ahead[0]
    assert encoded == [(0, 7)]
    assert next(iter(ahead)) is first
    assert list(ahead) == list(ahead)
    assert encoded == [(0, 7), (7, 7), (14, 6)]
    assert [tensors[0].array().tolist() for _, tensors in ahead] == [
        (part / 2).tolist() for part in (flat[:7], flat[7:14], flat[14:])
    ]


def test_chunks_go_in_the_order_in_which_they_are_added_and_once(small_chunks: None) -> None:
    ahead = Chunks(values(30), 3, as_it_is, in_order=False)
    assert (ahead.ready, len(ahead)) == (0, 5)
    ahead.add([4, 2])
    ahead.add([2, 0])
    assert [ahead[place][0].index for place in range(ahead.ready)] == [4, 2, 0]
    ahead.add(range(5))
    assert [chunk.index for chunk, _ in ahead] == [4, 2, 0, 1, 3]
