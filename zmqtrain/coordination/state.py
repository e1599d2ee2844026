"""Events, orders, requests and a whole coordinator as bytes and back, for the segment of a ps.

The format is msgpack with a few marked kinds of values, no pickle. A policy's state is its
attributes, so a policy that survives its ps has only plain data as attributes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, get_args

import msgpack

from zmqtrain.coordination import events
from zmqtrain.coordination.arrivals import Arrivals
from zmqtrain.coordination.coordinator import Coordinator, WorkerState
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.measuring import Measuring
from zmqtrain.policies import Policy, make_policy
from zmqtrain.protocol.orders import Order
from zmqtrain.store.changes import Contribution
from zmqtrain.wire import messages
from zmqtrain.wire.codec import Packer


def pack(value: Any) -> bytes:
    """Return events, orders, a coordinator, or containers of such and of plain data, as bytes.

    Raises:
        TypeError: the value holds something else.
    """
    return _PACKER.pack(value)


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_kind, list_hook=_decode, strict_map_key=False)


@dataclass(slots=True)
class _Kind:
    """The kind of value that the rest of a list holds."""

    kind: Any


def _policy_from(spec: str, attributes: dict[str, Any]) -> Policy:
    policy = make_policy(spec)
    vars(policy).update(attributes)
    return policy


_CONTAINERS: dict[type, Callable[[Any], Any]] = {tuple: list, set: sorted, deque: list}
"""Functions that make lists of containers."""

_RECORDS = (
    *(WorkerState, Ledger, Arrivals, Coordinator, Measuring),
    *get_args(events.Event),
    *get_args(Order),
    messages.Arrived,
    *(messages.Pull, messages.PullReply, messages.Push, messages.PushReply),
)
"""Dataclasses, packed as their fields."""

_KINDS = (*_CONTAINERS, *_RECORDS, Policy, int)
_MARKS = {kind: msgpack.ExtType(code, b"") for code, kind in enumerate(_KINDS)}
_FIELDS: dict[type, list[str]] = {kind: [field.name for field in fields(kind)] for kind in _RECORDS}
_VALUES = {kind: attrgetter(*names) for kind, names in _FIELDS.items() if len(names) > 1}


def _encode(value: Any) -> list[Any]:
    """Return a list of the value's kind and its content."""
    kind = type(value)
    if kind in _VALUES:
        return [_MARKS[kind], *_VALUES[kind](value)]
    if kind is Contribution:
        return list(value)
    if kind in _CONTAINERS:
        return [_MARKS[kind], *_CONTAINERS[kind](value)]
    if kind in _FIELDS:
        return [_MARKS[kind], *[getattr(value, name) for name in _FIELDS[kind]]]
    if isinstance(value, Policy):
        return [_MARKS[Policy], value.spec, vars(value)]
    if kind is int:  # of more than 64 bits
        return [_MARKS[int], hex(value)]
    raise TypeError(f"{value!r:.80} is not plain data")


def _kind(code: int, _: bytes) -> _Kind:
    return _Kind(_KINDS[code])


def _decode(items: list[Any]) -> Any:
    if not items or type(items[0]) is not _Kind:
        return items
    kind, content = items[0].kind, items[1:]
    if kind is Policy:
        return _policy_from(*content)
    if kind is int:
        return int(content[0], 16)
    if kind in _CONTAINERS:
        return kind(content)
    return kind(**dict(zip(_FIELDS[kind], content, strict=True)))


_PACKER = Packer(default=_encode, strict_types=True)
