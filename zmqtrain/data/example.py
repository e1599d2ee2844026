"""TensorFlow's ``Example``: a record of named lists, as protocol buffers encode it.

See https://protobuf.dev/programming-guides/encoding and tensorflow/core/example/feature.proto:
Example.features = 1; Features.feature = 1, a map with key = 1 and value = 2; a Feature has one of
bytes_list = 1, float_list = 2, int64_list = 3; each list has value = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import DataError

Feature: TypeAlias = list[bytes] | NDArray[Any]
"""Texts of bytes, a float32 array or an int64 array, each of one dimension."""

VARINT, BYTES = 0, 2  # kinds of fields
NBYTES = {1: 8, 5: 4}  # of other kinds
TEXTS, FLOATS = 1, 2  # kinds of lists


def parse_example(record: bytes) -> dict[str, Any]:
    """Return the features of an encoded Example by name, each a :data:`Feature`.

    Raises:
        DataError: it is no Example.
    """
    features: dict[str, Feature] = {}
    try:
        for part in _contents(record, 1):
            for entry in _contents(part, 1):
                (name,) = _contents(entry, 1)
                for kind, values in _fields(b"".join(_contents(entry, 2))):
                    features[name.decode()] = _list(kind, _contents(values, 1))
    except (IndexError, ValueError) as error:
        raise DataError(
            f"a record of {len(record)} bytes is not an Example ({error}); expected what "
            "tf.train.Example's SerializeToString returns; parse it as what it is"
        ) from error
    return features


def _list(kind: int, values: list[bytes]) -> Feature:
    """Return a list of values; numbers may be packed into one field, or have a field each."""
    if kind == TEXTS:
        return values
    content = b"".join(values)
    return np.frombuffer(content, "<f4") if kind == FLOATS else _integers(content)


def _contents(message: bytes, number: int) -> list[bytes]:
    return [content for found, content in _fields(message) if found == number]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each field; the content of an integer is its encoding.

    Raises:
        ValueError, IndexError: the message is cut or damaged.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == BYTES:
            nbytes, at = _varint(message, at)
            end = at + nbytes
        elif kind == VARINT:
            end = _varint(message, at)[1]
        elif kind in NBYTES:
            end = at + NBYTES[kind]
        else:
            raise ValueError(f"a field of kind {kind}")
        if end > len(message):
            raise ValueError("it is cut short")
        yield key >> 3, message[at:end]
        at = end


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at this place, and the place behind it."""
    value, shift = 0, 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _integers(content: bytes) -> NDArray[np.int64]:
    """Decode numbers one behind another: seven bits a byte, the lowest first."""
    if not content:
        return np.empty(0, np.int64)
    data = np.frombuffer(content, np.uint8)
    if data[-1] >= 128:
        raise ValueError("a number is cut short")
    ends = np.flatnonzero(data < 128) + 1
    starts = np.concatenate([[0], ends[:-1]])
    places = np.arange(data.size) - np.repeat(starts, ends - starts)
    bits = (data & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(bits, starts).view(np.int64)
