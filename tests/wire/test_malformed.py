"""Bytes that are no message: each is refused by a sentence that says what was wrong."""

from __future__ import annotations

import tracemalloc
import typing
from typing import Any

import msgpack
import pytest

from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import FRAME_NBYTES, MAX_DIMENSIONS, MAX_FRAMES
from zmqtrain.wire.codec import INLINE_NBYTES, MAX_HEADER_NBYTES, MAX_TENSORS, decode, request_id_of
from zmqtrain.wire.messages import PROTOCOL_VERSION, Message

MIB = 1 << 20
DEEP = "stands for 1016 nested lists"
DEEPLY_NESTED = b"\x91" * 1015 + b"\x90"  # msgpack unpacks it; it may be too deep for repr()

REST = [[], None, []]  # of a Push, which may be left out


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
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize(
    "frames",
    [
        *([], [b""], [b"GET / HTTP/1.1\r\n"], [b"\xc1"], [b"\x97\x01"], [b"\x91" * 2000]),
        *([b"\xdd\xff\xff\xff\xff"], [b"\xdf\xff\xff\xff\xff"], [b"\xdb\xff\xff\xff\xff"]),
        *([b"\xd6\x05\x00\x00\x00\x00"], [b"\x81\x01\x02"], [b"\xa2\xff\xfe"]),
        *([bytes(MAX_HEADER_NBYTES + 1)], [b"\x01"] * (MAX_FRAMES + 1)),
        *([b"\x90"], [b"\xa5hello"], [header(version="1")]),
        [b"\x93%c\x02\x03" % PROTOCOL_VERSION],
    ],
)
def test_frames_that_are_no_envelope_are_refused(frames: list[bytes]) -> None:
    assert refusal(*frames)


@pytest.mark.parametrize("parts", [[99], [99, "Shutdown", 3], [99, *"abcdefghij"]])
def test_other_protocol_version_is_refused_with_any_content(parts: list[Any]) -> None:
    told = refusal(msgpack.packb(parts))
    assert "version 99" in told and f"version {PROTOCOL_VERSION}" in told


@pytest.mark.parametrize(
    ("replaced", "field"),
    [
        *(({"kind": kind}, "kind") for kind in ("Explode", "__class__", 3, DEEP, "K" * 60000)),
        *(({"request_id": given}, "request id") for given in (-1, True)),
        ({"generation": -3}, "generation"),
        ({"sender": "ps 0"}, "Sender"),
        ({"sender": [0, 0, 0]}, "Sender.role"),
        ({"sender": ["ps", True, 0]}, "Sender.index"),
        *(({"body": given}, "3 fields of Shutdown") for given in (None, [1], [1, "x", "", 2])),
        *(({"body": [given, "x", ""]}, "Shutdown.exit_code") for given in (True, 1.0, DEEP)),
        ({"body": [1, 1, ""]}, "Shutdown.reason"),
        *(
            (
                {"kind": "Push", "body": [1, 0, 0, 1, given, True, {}, True, [], None, [], 1]},
                "Push.loss",
            )
            for given in ("0.5", True)
        ),
        ({"kind": "Push", "body": [1, 0, 0, 1, 0.5, 1, {}, True, [], None, [], 1]}, "Push.finite"),
        (
            {"kind": "Push", "body": [1, 0, 0, 1, 0.5, True, {}, 1, [], None, [], 1]},
            "Push.wants_parameters",
        ),
        *(
            (
                {"kind": "Push", "body": [1, 0, 0, 1, 0.5, True, given, True, [], None, [], 1]},
                "Push.sums",
            )
            for given in (None, [], {"accuracy": "1"}, {b"accuracy": 1.0})
        ),
        ({"kind": "Orders", "body": [1, 5, None]}, "Orders.orders"),
        *(
            ({"kind": "Orders", "body": [1, [given], None]}, field)
            for given, field in (
                (["Reduce", [0, "1"], None, 0], "Orders.orders: Reduce.workers"),
                (["Rate", "fast"], "Rate.learning_rate"),
                (["Apply"], "5 fields of Apply"),
                (["Explode", 1], "one of Apply, Accumulate"),
                ([["Apply"], 1], "one of Apply, Accumulate"),
                ([], "a name and fields"),
            )
        ),
        *(
            ({"kind": "Join", "body": ["nonce", given, "host:7", "", "", 0, 0]}, "Join.fingerprint")
            for given in ([], {b"k": "v"}, {"k": 1})
        ),
        ({"kind": "Initialize", "body": [1, ""]}, "Initialize.checkpoint"),
        (
            {
                "kind": "Heartbeat",
                "body": [[["a", "b", "c", 1.0, "soon"]], False, 0, [], [0, 0, 0, 0]],
            },
            "Heartbeat.waits: Wait.until_s",
        ),
    ],
)
def test_envelope_with_a_wrong_field_is_refused_by_its_name(
    replaced: dict[str, Any], field: str
) -> None:
    assert field in refusal(header(**replaced))


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        *((given, "list") for given in (None, [["|u1", [0], b""]] * (MAX_TENSORS + 1))),
        *(([given], "entry") for given in ("<f4", ["<f4", [1]])),
        *(([[given, [1], b""]], "dtype") for given in ("<c8", ">f4", "|V8", 4, ["<f4"])),
        *(([["<f4", given, b""]], "shape") for given in (1, [1] * (MAX_DIMENSIONS + 1), [-1])),
        *(([["<f4", [given], b""]], "whole numbers") for given in (1.0, True, DEEP)),
        *(([["<f4", given, b""]], "larger than") for given in ([2**63 - 1] * 2, [0, 2**63])),
        ([["<f4", [1 << 30], b""]], "0 B in frames"),
        ([["<f4", [2], b"1234567"]], "7 B in frames"),
        ([["<f4", [0], b"1"]], "1 B in frames"),
        *(([["<f4", [1], given]], "0 frames are left") for given in (1, -1, True, DEEP)),
        ([["<f4", [2000], bytes(INLINE_NBYTES + 1)]], "4097"),
    ],
)
def test_wrong_tensor_is_refused_before_it_is_allocated(tensors: Any, part: str) -> None:
    assert part in refusal(header(tensors=tensors))


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "0 frames are left"),
        ([b"x" * 4], "1 frames are left"),
        ([b"x" * 4, b"x" * 3], "7 B in frames"),
        ([b"x" * 4, b"x" * 4, b"x"], "1 frames more"),
    ],
)
def test_frames_other_than_the_header_describes_are_refused(frames: list[bytes], text: str) -> None:
    assert text in refusal(header(tensors=[["<f4", [2], 2]]), *frames)


def test_frame_above_the_frame_size_is_refused() -> None:
    nbytes = FRAME_NBYTES + 1
    told = header(tensors=[["|u1", [nbytes], 1]])
    assert f"{nbytes} B in frames" in refusal(told, bytes(nbytes))


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
