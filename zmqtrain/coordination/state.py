"""Events, orders and a whole coordinator as bytes and back, for the journal of a ps.

Nothing is pickled: what is kept is msgpack with a few marked kinds of values. A policy's state is
its attributes, so those of a policy that shall survive its ps are plain data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgpack

from zmqtrain.coordination import events
from zmqtrain.coordination.coordinator import Coordinator, Member
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.policies import Policy, make_policy
from zmqtrain.wire.messages import Order


def pack(value: Any) -> bytes:
    """Return events, orders, a coordinator, or containers of such and of plain data, as bytes.

    Raises:
        TypeError: it holds something else.
    """
    packed: bytes = msgpack.packb(value, default=_encode, strict_types=True)
    return packed


def unpack(data: bytes) -> Any:
    """Return what :func:`pack` packed."""
    return msgpack.unpackb(data, ext_hook=_decode, strict_map_key=False)


def _policy_from(state: list[Any]) -> Policy:
    spec, attributes = state
    policy = make_policy(spec)
    vars(policy).update(attributes)
    return policy


_CONTAINERS: dict[type, Callable[[Any], Any]] = {tuple: list, set: sorted, deque: list}
"""What the elements of a container are packed as."""

_RECORDS = (
    *(Order, Member, Ledger, Coordinator),
    *(events.PushArrived, events.PullArrived, events.Joined, events.Left),
    *(events.SwitchAsked, events.SnapshotAsked, events.CloseAsked, events.GivenUp),
)
"""Dataclasses, packed as their fields."""

_KINDS = (*_CONTAINERS, *_RECORDS, Policy)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_FIELDS: dict[type, list[str]] = {kind: [field.name for field in fields(kind)] for kind in _RECORDS}


def _encode(value: Any) -> msgpack.ExtType:
    kind = type(value)
    if kind in _FIELDS:
        content: Any = [getattr(value, name) for name in _FIELDS[kind]]
    elif kind in _CONTAINERS:
        content = _CONTAINERS[kind](value)
    elif isinstance(value, Policy):
        kind, content = Policy, [value.spec, vars(value)]
    else:
        raise TypeError(f"{value!r:.80} is no plain data")
    return msgpack.ExtType(_CODES[kind], pack(content))


def _decode(code: int, data: bytes) -> Any:
    kind, content = _KINDS[code], unpack(data)
    if kind is Policy:
        return _policy_from(content)
    if kind in _CONTAINERS:
        return kind(content)
    return kind(**dict(zip(_FIELDS[kind], content, strict=True)))
