"""One encoder, one decoder: an envelope to frames and back. No I/O.

Frame 0 is the header, a msgpack array: ``[version, kind, request_id, sender, generation, body,
tensors]``. Small tensors are inside it, the bytes of large ones follow as frames. Decoding checks
every field against the message's declaration and bounds every size before it allocates.
"""

from __future__ import annotations

import threading
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any, Literal, TypeVar

import msgpack

from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import FRAME_NBYTES, MAX_FRAMES, Buffer, Tensor, check_tensor, shown
from zmqtrain.wire.messages import PROTOCOL_VERSION, Message

INLINE_NBYTES = 4096  # tensors up to this size are in the header
MAX_HEADER_NBYTES = 1 << 20
MAX_TENSORS = 64
_ID_NBYTES = 64  # enough for version, kind and request id

# msgpack reserves memory for an array's claimed length at every nesting level, so these caps bound
# the cost of a hostile header: about 120 MiB while it is decoded, as a test measures.
_LIMITS: dict[str, Any] = {
    "raw": False,
    "use_list": True,
    "strict_map_key": True,
    "max_array_len": 4096,
    "max_map_len": 1024,
    "max_str_len": 65536,
    "max_bin_len": INLINE_NBYTES,
    "max_ext_len": 0,
}


@dataclass(slots=True)
class Sender:
    """The task and life that sent an envelope; incarnation 0 before it has joined."""

    role: str
    index: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


M = TypeVar("M")  # a kind of message


@dataclass(slots=True)
class Envelope:
    """One message with its address label.

    ``request_id`` pairs a reply with its request; 0 asks for no reply. ``generation`` is the
    timeline of the job that the sender is on (0 before it knows one).
    """

    message: Message
    sender: Sender
    request_id: int = 0
    generation: int = 0
    tensors: tuple[Tensor, ...] = ()

    def __str__(self) -> str:
        size = sum(tensor.nbytes for tensor in self.tensors)
        return f"{self.sender} #{self.request_id} {self.message}" + (f" +{size} B" if size else "")

    def expect(self, kind: type[M]) -> M:
        """Return the message of a reply.

        Raises:
            ProtocolError: it is of another kind.
        """
        if not isinstance(self.message, kind):
            raise ProtocolError(
                f"{self.sender} answered with {self.message}; expected {kind.__name__}"
            )
        return self.message


Check = Callable[[Any], Any]

_GETTERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}
"""The encoding of each structure: its values, behind its name if it is one of a union."""


def _fail(expected: str, value: Any) -> typing.NoReturn:
    raise ProtocolError(f"expected {expected}, got {shown(value)}")


def _scalar(kind: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            _fail(kind.__name__, value)
        return value

    return check


def _number(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        _fail("float", value)
    return float(value)


def _one_of(choices: tuple[str, ...]) -> Check:
    def check(value: Any) -> Any:
        if value not in choices:
            _fail(f"{', '.join(choices[:-1])} or {choices[-1]}", value)
        return value

    return check


def _items(kind: Any) -> Check:
    item, expected = _check_of(kind), {kind}

    def check(value: Any) -> Any:
        if type(value) is not list:
            _fail("a list", value)
        if expected.issuperset(map(type, value)):  # most are used as they are
            return tuple(value)
        return tuple([item(element) for element in value])

    return check


def _mapping(item: Check) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not dict:
            _fail("a map", value)
        for key in value:
            if type(key) is not str:
                _fail("str as key", key)
        return {key: item(element) for key, element in value.items()}

    return check


def _optional(item: Check) -> Check:
    return lambda value: None if value is None else item(value)


def _structure(kind: type) -> Check:
    hints = typing.get_type_hints(kind)
    checks = [(f.name, hints[f.name], _check_of(hints[f.name])) for f in fields(kind)]
    _GETTERS.setdefault(kind, _getter(kind))

    def check(value: Any) -> Any:
        if type(value) is not list or len(value) != len(checks):
            _fail(f"{len(checks)} fields of {kind.__name__}", value)
        for place, (name, hint, field_check) in enumerate(checks):
            if type(value[place]) is not hint:  # most values are used as they are
                try:
                    value[place] = field_check(value[place])
                except ProtocolError as error:
                    raise ProtocolError(f"{kind.__name__}.{name}: {error}") from None
        return kind(*value)

    return check


def _union(kinds: tuple[type, ...]) -> Check:
    """Check a list that names one of these structures, and holds its fields behind the name."""
    checks = {kind.__name__: _structure(kind) for kind in kinds}
    _GETTERS.update({kind: _getter(kind, "__class__.__name__") for kind in kinds})

    def check(value: Any) -> Any:
        if type(value) is not list or not value:
            _fail("a name and fields", value)
        name, *values = value
        named = checks.get(name) if type(name) is str else None
        if named is None:
            _fail(f"one of {', '.join(checks)}", name)
        return named(values)

    return check


def _check_of(hint: Any) -> Check:
    """Return the function that checks and converts a decoded value of the declared type."""
    if hint is float:
        return _number
    if hint in (int, str, bool):
        return _scalar(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return _structure(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple:
        return _items(arguments[0])
    if origin is dict:
        return _mapping(_check_of(arguments[1]))
    if origin is types.UnionType and arguments[1] is type(None):
        return _optional(_check_of(arguments[0]))
    if origin is types.UnionType:
        return _union(arguments)
    raise TypeError(f"{hint} is not a type that messages may be declared with")


def _getter(kind: type, *before: str) -> Callable[[Any], tuple[Any, ...]]:
    names = [*before, *(field.name for field in fields(kind))]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


_KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Message)}
_CHECKS = {name: _structure(kind) for name, kind in _KINDS.items()}
_CHECK_SENDER = _structure(Sender)


class Packer(threading.local):
    """A reused msgpack packer for each thread, since it has one buffer."""

    def __init__(self, **options: Any) -> None:
        self.pack: Callable[[Any], bytes] = msgpack.Packer(**options).pack


_PACKER = Packer(default=lambda structure: _GETTERS[type(structure)](structure))


def encode(envelope: Envelope) -> list[Buffer]:
    """Return the frames of one envelope; tensor frames are views of the tensors' memory."""
    frames: list[Buffer] = [b""]
    described: list[Any] = []
    for tensor in envelope.tensors:
        if tensor.nbytes <= INLINE_NBYTES:
            described.append([tensor.dtype, tensor.shape, b"".join(tensor.parts)])
        else:
            described.append([tensor.dtype, tensor.shape, len(tensor.parts)])
            frames.extend(tensor.parts)
    message, sender = envelope.message, envelope.sender
    frames[0] = _PACKER.pack(
        (
            PROTOCOL_VERSION,
            type(message).__name__,
            envelope.request_id,
            (sender.role, sender.index, sender.incarnation),
            envelope.generation,
            _GETTERS[type(message)](message),
            described,
        )
    )
    return frames


def decode(frames: Sequence[Buffer]) -> Envelope:
    """Return the envelope in these frames.

    Raises:
        ProtocolError: they are not an envelope of this protocol version.
    """
    _, kind, request_id, sender, generation, body, described = _header(frames)
    check = _CHECKS.get(kind) if type(kind) is str else None
    if check is None:
        raise ProtocolError(f"unknown message kind {shown(kind)}")
    if (
        type(request_id) is not int
        or type(generation) is not int
        or request_id < 0
        or generation < 0
    ):
        raise ProtocolError(
            f"request id {shown(request_id)} or generation {shown(generation)} is not a count"
        )
    return Envelope(
        check(body), _CHECK_SENDER(sender), request_id, generation, _tensors(described, frames[1:])
    )


def request_id_of(frames: Sequence[Buffer]) -> int:
    """Return the request id in frames that did not decode, 0 if even that cannot be read.

    Only the first bytes are searched: a costly message must not cost twice.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=_ID_NBYTES)
    try:
        unpacker.feed(frames[0][:_ID_NBYTES])
        unpacker.read_array_header()
        unpacker.skip()
        unpacker.skip()
        request_id = unpacker.unpack()
    except (LookupError, ValueError, RecursionError, msgpack.UnpackException):
        return 0
    return request_id if type(request_id) is int and request_id >= 0 else 0


def _header(frames: Sequence[Buffer]) -> list[Any]:
    if not frames or not len(frames[0]):
        raise ProtocolError("the message is empty")
    if len(frames) > MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames, at most {MAX_FRAMES} are taken")
    header = _unpack(frames[0])
    if type(header) is not list or not header or type(header[0]) is not int:
        raise ProtocolError("the header is not a zmqtrain envelope")
    if header[0] != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {header[0]}, this task version {PROTOCOL_VERSION}: "
            "install the same zmqtrain on every host"
        )
    if len(header) != 7:
        raise ProtocolError(f"the header has {len(header)} parts, expected 7")
    return header


def _unpack(header: Buffer) -> Any:
    if len(header) > MAX_HEADER_NBYTES:
        raise ProtocolError(f"header of {len(header)} B, at most {MAX_HEADER_NBYTES} B are taken")
    try:
        return msgpack.unpackb(header, **_LIMITS)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise ProtocolError(f"the header is not msgpack within limits: {reason:.120}") from None


def _tensors(described: Any, frames: Sequence[Buffer]) -> tuple[Tensor, ...]:
    if type(described) is not list or len(described) > MAX_TENSORS:
        raise ProtocolError(f"expected a list of at most {MAX_TENSORS} tensors")
    if not described and not frames:
        return ()
    tensors = []
    taken = 0
    for entry in described:
        if type(entry) is not list or len(entry) != 3:
            raise ProtocolError(f"tensor entry {shown(entry)} is not [dtype, shape, data]")
        dtype, shape = check_tensor(entry[0], entry[1])
        data = entry[2]
        if type(data) is bytes:
            parts: tuple[Buffer, ...] = (data,)
        elif type(data) is int and 0 <= data <= len(frames) - taken:
            parts = tuple(frames[taken : taken + data])
            taken += data
        else:
            raise ProtocolError(f"tensor data {shown(data)}: {len(frames) - taken} frames are left")
        tensor = Tensor(dtype, shape, parts)
        nbytes = sum(len(part) for part in parts)
        if nbytes != tensor.nbytes or any(len(part) > FRAME_NBYTES for part in parts):
            raise ProtocolError(f"{nbytes} B in frames for a tensor of {dtype} {list(shape)}")
        tensors.append(tensor)
    if taken != len(frames):
        raise ProtocolError(f"{len(frames) - taken} frames more than the header describes")
    return tuple(tensors)
