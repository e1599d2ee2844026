"""Bytes that are no message: each is refused by a sentence that says what was wrong."""

from __future__ import annotations

import tracemalloc
import typing
from typing import Any

import msgpack
import pytest

from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import FRAME_NBYTES, MAX_DIMENSIONS, MAX_FRAMES
from zmqtrain.wire.codec import (
    INLINE_NBYTES,
    MAX_HEADER_NBYTES,
    MAX_TENSORS,
    decode,
    request_id_of,
)
from zmqtrain.wire.messages import PROTOCOL_VERSION, Message

MIB = 1 << 20
LIMITS = "the header is not msgpack within limits: "
NO_ENVELOPE = "the header is not a zmqtrain envelope"
DTYPES = "['<f2', '<f4', '<f8', '<i4', '<i8', '|i1', '|u1']"

DEEP = "stands for 1016 nested lists"
DEEPLY_NESTED = b"\x91" * 1015 + b"\x90"  # msgpack unpacks it; it may be too deep for repr()


def header(**replaced: Any) -> bytes:
    """A header that is valid but for what is replaced."""
    parts = {
        "version": PROTOCOL_VERSION,
        "kind": "Shutdown",
        "request_id": 7,
        "sender": ["ps", 0, 0],
        "generation": 1,
        "body": [1, "it diverged", ""],
        "tensors": [],
    }
    whole = msgpack.packb(list((parts | replaced).values()))
    return whole.replace(msgpack.packb(DEEP), DEEPLY_NESTED)


def refusal(*frames: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(frames)
    return str(caught.value)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "the message is empty"),
        ([b""], "the message is empty"),
        ([b"GET / HTTP/1.1\r\n"], LIMITS + "unpack(b) received extra data."),
        ([b"\xc1"], LIMITS + "FormatError"),
        ([b"\x97\x01"], LIMITS + "Unpack failed: incomplete input"),
        ([b"\x91" * 2000], LIMITS + "StackError"),
        ([b"\xdd\xff\xff\xff\xff"], LIMITS + "4294967295 exceeds max_array_len(4096)"),
        ([b"\xdf\xff\xff\xff\xff"], LIMITS + "4294967295 exceeds max_map_len(1024)"),
        ([b"\xdb\xff\xff\xff\xff"], LIMITS + "Unpack failed: incomplete input"),
        ([b"\xd6\x05\x00\x00\x00\x00"], LIMITS + "5 exceeds max_ext_len(0)"),
        ([b"\x81\x01\x02"], LIMITS + "int is not allowed for map key when strict_map_key=True"),
        (
            [b"\xa2\xff\xfe"],
            LIMITS + "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        ([bytes(MAX_HEADER_NBYTES + 1)], "header of 1048577 B, at most 1048576 B are taken"),
        ([b"\x01"] * (MAX_FRAMES + 1), "65537 frames, at most 65536 are taken"),
        ([b"\x90"], NO_ENVELOPE),
        ([b"\xa5hello"], NO_ENVELOPE),
        ([header(version="1")], NO_ENVELOPE),
        ([b"\x93%c\x02\x03" % PROTOCOL_VERSION], "the header has 3 parts, expected 7"),
    ],
)
def test_frames_that_are_no_envelope_are_refused(frames: list[bytes], text: str) -> None:
    assert refusal(*frames) == text


@pytest.mark.parametrize("parts", [[99], [99, "Shutdown", 3], [99, *"abcdefghij"]])
def test_other_protocol_version_is_refused_whatever_else_it_says(parts: list[Any]) -> None:
    assert refusal(msgpack.packb(parts)) == (
        f"the peer speaks protocol version 99, this task version {PROTOCOL_VERSION}: install the "
        "same zmqtrain on every host"
    )


@pytest.mark.parametrize(
    ("replaced", "text"),
    [
        ({"kind": "Explode"}, "unknown message kind 'Explode'"),
        ({"kind": "__class__"}, "unknown message kind '__class__'"),
        ({"kind": 3}, "unknown message kind 3"),
        ({"kind": DEEP}, "unknown message kind [[[[[[[...]]]]]]]"),
        ({"kind": "K" * 60000}, "unknown message kind 'KKKKKKKKKKKK...KKKKKKKKKKKKK'"),
        ({"request_id": -1}, "request id -1 or generation 1 is no count"),
        ({"request_id": True}, "request id True or generation 1 is no count"),
        ({"generation": -3}, "request id 7 or generation -3 is no count"),
        ({"sender": "ps 0"}, "expected 3 fields of Sender, got 'ps 0'"),
        ({"sender": [0, 0, 0]}, "Sender.role: expected str, got 0"),
        ({"sender": ["ps", True, 0]}, "Sender.index: expected int, got True"),
        ({"body": None}, "expected 3 fields of Shutdown, got None"),
        ({"body": [1]}, "expected 3 fields of Shutdown, got [1]"),
        ({"body": [1, "x", "", 2]}, "expected 3 fields of Shutdown, got [1, 'x', '', 2]"),
        ({"body": [True, "x", ""]}, "Shutdown.exit_code: expected int, got True"),
        ({"body": [1.0, "x", ""]}, "Shutdown.exit_code: expected int, got 1.0"),
        ({"body": [DEEP, "x", ""]}, "Shutdown.exit_code: expected int, got [[[[[[[...]]]]]]]"),
        ({"body": [1, 1, ""]}, "Shutdown.reason: expected str, got 1"),
        (
            {"kind": "Push", "body": [1, 0, 0, 1, "0.5", True]},
            "Push.loss: expected float, got '0.5'",
        ),
        (
            {"kind": "Push", "body": [1, 0, 0, 1, True, True]},
            "Push.loss: expected float, got True",
        ),
        ({"kind": "Push", "body": [1, 0, 0, 1, 0.5, 1]}, "Push.finite: expected bool, got 1"),
        ({"kind": "Orders", "body": [1, 5]}, "Orders.orders: expected a list, got 5"),
        (
            {"kind": "Orders", "body": [1, [["apply", [0, "1"], "", 0, 0, [], False]]]},
            "Orders.orders: Order.workers: expected int, got '1'",
        ),
        (
            {"kind": "Join", "body": ["nonce", [], "host:7", "", "", 0]},
            "Join.fingerprint: expected a map, got []",
        ),
        (
            {"kind": "Join", "body": ["nonce", {b"k": "v"}, "host:7", "", "", 0]},
            "Join.fingerprint: expected str as key, got b'k'",
        ),
        (
            {"kind": "Join", "body": ["nonce", {"k": 1}, "host:7", "", "", 0]},
            "Join.fingerprint: expected str, got 1",
        ),
        ({"kind": "Initialize", "body": [1, ""]}, "Initialize.checkpoint: expected str, got 1"),
        (
            {"kind": "Heartbeat", "body": [[["a", "b", "c", 1.0, "soon"]], False, 0, []]},
            "Heartbeat.waits: Wait.until_s: expected float, got 'soon'",
        ),
    ],
)
def test_envelope_with_a_wrong_field_is_refused_by_its_name(
    replaced: dict[str, Any], text: str
) -> None:
    assert refusal(header(**replaced)) == text


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (None, "expected a list of at most 64 tensors"),
        ([["|u1", [0], b""]] * (MAX_TENSORS + 1), "expected a list of at most 64 tensors"),
        (["<f4"], "tensor entry '<f4' is not [dtype, shape, data]"),
        ([["<f4", [1]]], "tensor entry ['<f4', [1]] is not [dtype, shape, data]"),
        ([["<c8", [1], b""]], f"tensor dtype '<c8' is not one of {DTYPES}"),
        ([[">f4", [1], b""]], f"tensor dtype '>f4' is not one of {DTYPES}"),
        ([["|V8", [1], b""]], f"tensor dtype '|V8' is not one of {DTYPES}"),
        ([[4, [1], b""]], f"tensor dtype 4 is not one of {DTYPES}"),
        ([[["<f4"], [1], b""]], f"tensor dtype ['<f4'] is not one of {DTYPES}"),
        ([["<f4", 1, b""]], "tensor shape 1 is not a list of at most 8"),
        (
            [["<f4", [1] * (MAX_DIMENSIONS + 1), b""]],
            "tensor shape [1, 1, 1, 1, 1, 1, ...] is not a list of at most 8",
        ),
        ([["<f4", [-1], b""]], "tensor shape [-1] holds -1, expected whole numbers"),
        ([["<f4", [1.0], b""]], "tensor shape [1.0] holds 1.0, expected whole numbers"),
        ([["<f4", [True], b""]], "tensor shape [True] holds True, expected whole numbers"),
        (
            [["<f4", [DEEP], b""]],
            "tensor shape [[[[[[[...]]]]]]] holds [[[[[[[...]]]]]]], expected whole numbers",
        ),
        (
            [["<f4", [2**63 - 1, 2**63 - 1], b""]],
            "tensor shape [9223372036854775807, 9223372036854775807] is larger than any message",
        ),
        (
            [["<f4", [0, 2**63], b""]],
            "tensor shape [0, 9223372036854775808] is larger than any message",
        ),
        ([["<f4", [1 << 30], b""]], "0 B in frames for a tensor of <f4 [1073741824]"),
        ([["<f4", [2], b"1234567"]], "7 B in frames for a tensor of <f4 [2]"),
        ([["<f4", [0], b"1"]], "1 B in frames for a tensor of <f4 [0]"),
        ([["<f4", [1], 1]], "tensor data 1: 0 frames are left"),
        ([["<f4", [1], -1]], "tensor data -1: 0 frames are left"),
        ([["<f4", [1], True]], "tensor data True: 0 frames are left"),
        ([["<f4", [1], DEEP]], "tensor data [[[[[[[...]]]]]]]: 0 frames are left"),
        ([["<f4", [2000], bytes(INLINE_NBYTES + 1)]], LIMITS + "4097 exceeds max_bin_len(4096)"),
    ],
)
def test_wrong_tensor_is_refused_before_it_is_allocated(tensors: Any, text: str) -> None:
    assert refusal(header(tensors=tensors)) == text


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "tensor data 2: 0 frames are left"),
        ([b"x" * 4], "tensor data 2: 1 frames are left"),
        ([b"x" * 4, b"x" * 3], "7 B in frames for a tensor of <f4 [2]"),
        ([b"x" * 4, b"x" * 4, b"x"], "1 frames more than the header describes"),
    ],
)
def test_frames_other_than_the_header_describes_are_refused(frames: list[bytes], text: str) -> None:
    assert refusal(header(tensors=[["<f4", [2], 2]]), *frames) == text


def test_count_of_frames_that_is_a_boolean_is_refused() -> None:
    told = header(tensors=[["|u1", [1], True]])
    assert refusal(told, b"x") == "tensor data True: 1 frames are left"


def test_frames_that_no_tensor_asked_for_are_refused() -> None:
    assert refusal(header(), b"x", b"y") == "2 frames more than the header describes"


def test_frame_above_the_frame_size_is_refused() -> None:
    nbytes = FRAME_NBYTES + 1
    told = header(tensors=[["|u1", [nbytes], 1]])
    assert refusal(told, bytes(nbytes)) == f"{nbytes} B in frames for a tensor of |u1 [{nbytes}]"


def cost_of(hostile: bytes) -> int:
    """The most bytes of memory that were held while it was refused."""
    tracemalloc.start()
    try:
        refusal(hostile)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


ARRAYS = b"\xdc\x10\x00" * 900  # room for 4,096 values at each level
MAPS = b"\x81\xa0" * 100 + b"\x80"  # the largest object for two bytes


@pytest.mark.parametrize("hostile", [ARRAYS, (ARRAYS + MAPS * 6000)[:MAX_HEADER_NBYTES]])
def test_hostile_header_costs_at_most_160_mib(hostile: bytes) -> None:
    assert cost_of(hostile) < 160 * MIB


@pytest.mark.parametrize(
    "hostile",
    [b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdc\x10\x00"],
)
def test_claimed_length_costs_nothing(hostile: bytes) -> None:
    assert cost_of(hostile) < MIB


@pytest.mark.parametrize("hostile", [ARRAYS, b"\x97" + ARRAYS, b"\x97\x02\xa0" + ARRAYS])
def test_request_id_of_a_hostile_header_costs_next_to_nothing(hostile: bytes) -> None:
    tracemalloc.start()
    try:
        assert request_id_of([hostile]) == 0
        assert tracemalloc.get_traced_memory()[1] < MIB / 16
    finally:
        tracemalloc.stop()


def test_first_bytes_of_every_message_hold_its_request_id() -> None:
    for kind in typing.get_args(Message):
        parts = [2**64 - 1, kind.__name__, 2**64 - 1, ["worker", 0, 0], 0, [], []]
        assert request_id_of([msgpack.packb(parts)]) == 2**64 - 1


@pytest.mark.parametrize(
    ("frames", "request_id"),
    [
        ([header(body=None)], 7),
        ([header(version=99)], 7),
        ([b"\x93\x01\x02\x09"], 9),
        ([header(request_id=2**64 - 1)], 2**64 - 1),
        ([header(request_id=300)[:-3]], 300),
        ([header(body=DEEP)], 7),
        ([header(kind="K" * 70)], 0),
        ([header(request_id=DEEP)], 0),
        ([header(request_id=-1)], 0),
        ([], 0),
        ([b""], 0),
        ([b"\xc1"], 0),
        ([b"\x05"], 0),
        ([b"\x92\x01\x02"], 0),
        ([b"\x81\xa1a\x01"], 0),
        ([b"\x91" * 2000], 0),
        ([bytes(MAX_HEADER_NBYTES + 1)], 0),
    ],
)
def test_request_id_of_a_broken_message_is_found_or_0(frames: list[bytes], request_id: int) -> None:
    assert request_id_of(frames) == request_id
