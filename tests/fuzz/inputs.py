"""Frames for the decoder, and the promises that it keeps for any of them.

Run it to write the corpus again after a message has changed: `python tests/fuzz/inputs.py`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from zmqtrain.errors import ProtocolError
from zmqtrain.wire import chunks
from zmqtrain.wire.buffers import Buffer, Tensor
from zmqtrain.wire.codec import Envelope, Sender, decode, encode, request_id_of
from zmqtrain.wire.compression import make_compression
from zmqtrain.wire.messages import Message, Push, Refusal
from zmqtrain.wire.refusals import error_of

CORPUS = Path(__file__).with_name("corpus")
KINDS = typing.get_args(Message)

SPECS = ("fp16", "bf16", "int8:block=8", "topk:ratio=0.3")
COMPRESSIONS = [compression for spec in SPECS if (compression := make_compression(spec))]
SIZES = (0, 1, 20)  # of the gradients that compressed tensors are decoded into
MARK = np.float32(7)

MAX_TEXT = 500  # characters of a refusal


def joined(frames: Sequence[Buffer]) -> bytes:
    """Return frames as one input: each behind its length, 4 bytes, the greatest first."""
    return b"".join(len(frame).to_bytes(4, "big") + bytes(frame) for frame in frames)


def frames_of(data: bytes) -> list[Buffer]:
    """Return the frames in an input; any bytes have some, the last one may be cut off."""
    frames: list[Buffer] = []
    while data:
        stop = 4 + int.from_bytes(data[:4], "big")
        frames.append(data[4:stop])
        data = data[stop:]
    return frames


def check(frames: Sequence[Buffer]) -> Envelope | None:
    """Return the envelope in a peer's frames, None if they are refused.

    Raises:
        Exception: the wire broke a promise. Frames that are no envelope are a ProtocolError with a
            short text; an envelope stays the same when it is encoded and decoded.
    """
    assert request_id_of(frames) >= 0
    try:
        envelope = decode(frames)
    except ProtocolError as error:
        assert 0 < len(str(error)) < MAX_TEXT, error
        return None
    assert str(envelope)
    sent = [bytes(frame) for frame in encode(envelope)]
    again = decode(sent)
    assert [bytes(frame) for frame in encode(again)] == sent
    for here, there in zip(envelope.tensors, again.tensors, strict=True):
        assert here.array().tobytes() == there.array().tobytes()
    _check_gradients(envelope.tensors)
    if isinstance(envelope.message, Refusal):
        assert str(error_of(envelope.message, "ps 0"))
    return envelope


def _check_gradients(tensors: Sequence[Tensor]) -> None:
    """Take the tensors for a gradient in each of its forms: all of it is taken in, or nothing."""
    for size in SIZES:
        for take_in in (chunks.take_in, *(each.decode for each in COMPRESSIONS)):
            out = np.full(size, MARK, np.float32)
            try:
                take_in(tensors, out)
            except ProtocolError as error:
                assert 0 < len(str(error)) < MAX_TEXT, error
                assert (out == MARK).all(), error


def examples() -> Iterator[tuple[str, bytes]]:
    """Yield the corpus: name and content of an input for each kind of message, and some pushes."""
    for kind in KINDS:
        yield kind.__name__, joined(_encoded(_value(kind)))
    push = Push(5, 4, 17, 32, 0.25)
    gradient = np.linspace(-1, 1, max(SIZES), dtype=np.float32)
    yield "Push-float32", joined(_encoded(push, Tensor.of(gradient)))
    yield (
        "Push-frames",
        joined(_in_frames(_encoded(push, Tensor.of(gradient), Tensor.of(gradient)))),
    )
    for compression in COMPRESSIONS:
        name = compression.spec.partition(":")[0]
        yield f"Push-{name}", joined(_encoded(push, *compression.encode(gradient)))


def _encoded(message: Message, *tensors: Tensor) -> list[Buffer]:
    return encode(Envelope(message, Sender("worker", 3, 2), 300, 1, tensors))


def _in_frames(frames: list[Buffer]) -> list[Buffer]:
    """Return the message with its tensors in frames, two each, though they are small."""
    header = msgpack.unpackb(frames[0])
    for described in header[-1]:
        data, described[2] = described[2], 2
        frames += [data[:9], data[9:]]
    return [msgpack.packb(header), *frames[1:]]


def _value(hint: Any) -> Any:
    """Return some value of a type that messages are declared with."""
    scalars: dict[Any, Any] = {int: 3, float: 0.5, str: "text", bool: True}
    if hint in scalars:
        return scalars[hint]
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{f.name: _value(hints[f.name]) for f in fields(hint)})
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        return (_value(arguments[0]),)
    if origin is dict:
        return {"key": _value(arguments[1])}
    if origin is types.UnionType:
        return _value(arguments[0])
    raise TypeError(f"{hint} is not a type that messages may be declared with")


def main() -> None:
    """Write the corpus; what fuzzing found stays."""
    CORPUS.mkdir(exist_ok=True)
    for path in CORPUS.iterdir():
        if not path.name.startswith("found-"):
            path.unlink()
    for name, content in examples():
        (CORPUS / name).write_bytes(content)


if __name__ == "__main__":
    main()
