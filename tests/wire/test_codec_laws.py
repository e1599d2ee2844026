"""Laws that the codec keeps for every message; a new message joins by being declared."""

from __future__ import annotations

import typing

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import inputs
from tests.wire.values import values_of
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import DTYPES, FRAME_NBYTES, MAX_DIMENSIONS, Buffer, Tensor
from zmqtrain.wire.codec import INLINE_NBYTES, Envelope, Sender, decode, encode
from zmqtrain.wire.control import Shutdown
from zmqtrain.wire.messages import Heartbeat, Message, Push

KINDS = typing.get_args(Message)
SIGNED = st.integers(-(2**63), 2**64 - 1)
COUNTS = st.integers(0, 2**64 - 1)
# NaN travels too, but is not equal to itself.
SCALARS = {int: SIGNED, float: st.floats(allow_nan=False), str: st.text(), bool: st.booleans()}


def test_reply_of_another_kind_is_an_error() -> None:
    reply = Envelope(Heartbeat(), Sender("ps", 1))
    assert reply.expect(Heartbeat) is reply.message
    with pytest.raises(ProtocolError, match=r"^ps 1 answered with Heartbeat\(.*; expected Push$"):
        reply.expect(Push)


def tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Any bytes: NaN payloads and infinities among them."""
    item = np.dtype(dtype)
    data = np.random.default_rng(seed).bytes(int(np.prod(shape, dtype=int)) * item.itemsize)
    return Tensor.of(np.frombuffer(data, item).reshape(shape))


TENSORS = st.builds(
    tensor,
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 3), max_size=MAX_DIMENSIONS).map(tuple),
    st.integers(0, 2**32),
)
SENDERS = st.builds(Sender, st.text(), COUNTS, COUNTS)
ENVELOPES = st.builds(
    Envelope,
    st.one_of(*(values_of(kind, SCALARS) for kind in KINDS)),
    SENDERS,
    COUNTS,
    COUNTS,
    st.lists(TENSORS, max_size=3).map(tuple),
)
PUSH = encode(
    Envelope(Push(1, 0, 7, 32, 0.5), Sender("worker", 2, 1), 9, 1, (tensor("<f4", (2048,)),))
)


def wired(frames: list[Buffer]) -> list[Buffer]:
    """Frames as a transport hands them over: none is the sender's memory."""
    return [bytes(frame) for frame in frames]


def assert_same(received: Envelope, sent: Envelope) -> None:
    assert (received.message, received.sender) == (sent.message, sent.sender)
    assert (received.request_id, received.generation) == (sent.request_id, sent.generation)
    assert len(received.tensors) == len(sent.tensors)
    for there, here in zip(received.tensors, sent.tensors, strict=True):
        assert (there.dtype, there.shape) == (here.dtype, here.shape)
        assert b"".join(there.parts) == b"".join(here.parts)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=10)
@given(data=st.data())
def test_every_message_arrives_as_it_was_sent(kind: type, data: st.DataObject) -> None:
    sent = Envelope(
        data.draw(values_of(kind, SCALARS)),
        data.draw(SENDERS),
        data.draw(COUNTS),
        data.draw(COUNTS),
        data.draw(st.lists(TENSORS, max_size=2).map(tuple)),
    )
    assert_same(decode(wired(encode(sent))), sent)


@pytest.mark.parametrize(
    ("nbytes", "frames"),
    [
        (0, 0),
        (INLINE_NBYTES, 0),
        (INLINE_NBYTES + 1, 1),
        (FRAME_NBYTES, 1),
        (FRAME_NBYTES + 1, 2),
        (2 * FRAME_NBYTES, 2),
        (2 * FRAME_NBYTES + 5, 3),
    ],
)
def test_small_tensors_ride_in_the_header_and_large_ones_in_frames(
    nbytes: int, frames: int
) -> None:
    sent = Envelope(Push(1, 0, 0, 1, 0.0), Sender("worker", 0), 1, 1, (tensor("|u1", (nbytes,)),))
    encoded = encode(sent)
    assert len(encoded) == 1 + frames
    assert all(len(frame) <= FRAME_NBYTES for frame in encoded[1:])
    assert_same(decode(wired(encoded)), sent)


def test_large_tensor_is_sent_without_a_copy() -> None:
    array = np.zeros(INLINE_NBYTES, np.float32)
    frames = encode(Envelope(Shutdown(0, ""), Sender("ps", 0), 0, 0, (Tensor.of(array),)))
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), array)


def test_nan_and_whole_numbers_are_floats_too() -> None:
    push = Push(1, 0, 0, 1, float("nan"))
    assert np.isnan(decode(encode(Envelope(push, Sender("worker", 0)))).message.loss)
    push.loss = 3
    assert type(decode(encode(Envelope(push, Sender("worker", 0)))).message.loss) is float


@st.composite
def mutated(draw: st.DrawFn) -> list[Buffer]:
    """A valid message after some accidents to its bytes and frames."""
    frames = wired(draw(st.one_of(st.just(PUSH), ENVELOPES.map(encode))))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(frames) - 1))
        frame = bytes(frames[at])
        start, stop = sorted(draw(st.tuples(*[st.integers(0, min(len(frame), 200))] * 2)))
        match draw(st.sampled_from(["bytes", "bytes", "bytes", "drop", "repeat", "reverse"])):
            case "bytes":
                frames[at] = frame[:start] + draw(st.binary(max_size=8)) + frame[stop:]
            case "drop":
                del frames[at]
            case "repeat":
                frames.insert(at, frame)
            case "reverse":
                frames.reverse()
        if not frames:
            break
    return frames


ANYTHING = st.recursive(
    st.none() | st.booleans() | SIGNED | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=8,
)


@st.composite
def with_a_wrong_value(draw: st.DrawFn) -> list[Buffer]:
    """A valid message with any value in one place of its header."""
    frames = wired(encode(draw(ENVELOPES)))
    header = msgpack.unpackb(frames[0])
    place, part = header, draw(st.integers(0, 6))
    while isinstance(place[part], list) and place[part] and draw(st.booleans()):
        place = place[part]
        part = draw(st.integers(0, len(place) - 1))
    place[part] = draw(ANYTHING)
    return [msgpack.packb(header), *frames[1:]]


@settings(max_examples=250)
@given(frames=mutated() | with_a_wrong_value())
def test_damaged_message_decodes_or_is_refused(frames: list[Buffer]) -> None:
    inputs.check(frames)
