"""What travels, byte for byte: peers of this protocol version depend on it."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import (
    PROTOCOL_VERSION,
    Chunk,
    Join,
    MapSegment,
    Push,
    PushReply,
    RowChunk,
    Welcome,
)

HINT = (
    "the format of messages has changed: raise PROTOCOL_VERSION in zmqtrain/wire/messages.py, so "
    "that peers of the old format are refused by a clear text, then renew these bytes"
)

JOIN = Envelope(Join("5eed", {"seed": "0"}, "host:7", "", "", 0), Sender("worker", 3), 1)
JOIN_BYTES = (
    b"\x97\x1e\xa4Join\x01\x93\xa6worker\x03\x00\x00"
    b"\x97\xa45eed\x81\xa4seed\xa10\xa6host:7\xa0\xa0\x00\x00\x90"
)

WELCOME = Envelope(Welcome(7, "/dev/shm/0", 1 << 23), Sender("ps", 0), 1, 1)
WELCOME_BYTES = (
    b"\x97\x1e\xa7Welcome\x01\x93\xa2ps\x00\x00\x01"
    b"\x94\x07\xaa/dev/shm/0\xce\x00\x80\x00\x00\xa0\x90"
)

MAP = Envelope(MapSegment("shm", "5eed"), Sender("worker", 3, 2), 2, 1)
MAP_BYTES = b"\x97\x1e\xaaMapSegment\x02\x93\xa6worker\x03\x02\x01\x92\xa3shm\xa45eed\x90"

SMALL = np.array([1, -2], "<f4")
MEASURED = Push(5, 4, 17, 32, 0.25, True, {"right": 30.0}, weight=35.0, rows=(3, 0))
PUSH = Envelope(MEASURED, Sender("worker", 3, 2), 300, 1, (Tensor.of(SMALL),))
PUSH_BYTES = (
    b"\x97\x1e\xa4Push\xcd\x01,\x93\xa6worker\x03\x02\x01"
    b"\x9c\x05\x04\x11 \xcb?\xd0\x00\x00\x00\x00\x00\x00\xc3"
    b"\x81\xa5right\xcb@>\x00\x00\x00\x00\x00\x00\xc3\x90\xcb@A\x80\x00\x00\x00\x00\x00\x92\x03\x00\x01"
    b"\x91\x93\xa3<f4\x91\x02\xc4\x08\x00\x00\x80?\x00\x00\x00\xc0"
)

ROWS = Envelope(RowChunk(5, 1, (0, 2), (2, 0)), Sender("worker", 3, 2), 300, 1)
ROWS_BYTES = (
    b"\x97\x1e\xa8RowChunk\xcd\x01,\x93\xa6worker\x03\x02\x01"
    b"\x94\x05\x01\x92\x00\x02\x92\x02\x00\x90"
)

LARGE = np.arange(1025, dtype="<f4")
CHUNK = Envelope(Chunk(5, 2), Sender("worker", 3, 2), 300, 1, (Tensor.of(LARGE),))
CHUNK_BYTES = (
    b"\x97\x1e\xa5Chunk\xcd\x01,\x93\xa6worker\x03\x02\x01"
    b"\x93\x05\x02\xc2\x91\x93\xa3<f4\x91\xcd\x04\x01\x01"
)

REPLY = Envelope(
    PushReply(5, "applied", 6, (18, 19), held_s=0.5), Sender("ps", 0), 300, 1, (Tensor.of(LARGE),)
)
REPLY_BYTES = (
    b"\x97\x1e\xa9PushReply\xcd\x01,\x93\xa2ps\x00\x00\x01"
    b"\x9b\x05\xa7applied\x06\x92\x12\x13\xc2\xa0\xcb?\xe0\x00\x00\x00\x00\x00\x00\x00\xc0\xc2\xc2"
    b"\x91\x93\xa3<f4\x91\xcd\x04\x01\x01"
)

golden = pytest.mark.parametrize(
    ("envelope", "frames"),
    [
        pytest.param(JOIN, [JOIN_BYTES], id="join"),
        pytest.param(WELCOME, [WELCOME_BYTES], id="welcome that names a segment"),
        pytest.param(MAP, [MAP_BYTES], id="proof of having reached it"),
        pytest.param(PUSH, [PUSH_BYTES], id="push with its gradient in the header"),
        pytest.param(ROWS, [ROWS_BYTES], id="which rows follow"),
        pytest.param(CHUNK, [CHUNK_BYTES, LARGE.tobytes()], id="chunk and a frame"),
        pytest.param(REPLY, [REPLY_BYTES, LARGE.tobytes()], id="answer and a frame"),
    ],
)


@golden
def test_message_has_the_bytes_of_its_protocol_version(
    envelope: Envelope, frames: list[bytes]
) -> None:
    assert PROTOCOL_VERSION == 30, "renew the bytes in this file: they are of version 30"
    assert [bytes(frame) for frame in encode(envelope)] == frames, HINT


@golden
def test_bytes_of_this_protocol_version_are_understood(
    envelope: Envelope, frames: list[bytes]
) -> None:
    received = decode(frames)
    assert (received.message, received.sender) == (envelope.message, envelope.sender), HINT
    assert (received.request_id, received.generation) == (
        envelope.request_id,
        envelope.generation,
    ), HINT
