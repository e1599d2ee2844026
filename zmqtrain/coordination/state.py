"""A coordinator as bytes and back, so that its next life can go on from where it was.

Nothing is pickled: what is kept is msgpack with a few marked kinds of containers. A policy's state
is its attributes, so those of a policy that shall survive its ps are plain data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgpack

from zmqtrain.coordination.coordinator import Coordinator, Member
from zmqtrain.policies import make_policy
from zmqtrain.wire.messages import Order


def _values(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in fields(record)]


_KINDS: dict[int, tuple[type, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    1: (tuple, list, tuple),
    2: (set, sorted, set),
    3: (deque, list, deque),
    4: (Member, _values, lambda values: Member(*values)),
    5: (Order, _values, lambda values: Order(*values)),
}
_CODES = {kind: code for code, (kind, _, _) in _KINDS.items()}

_OF_COORDINATOR = (
    "shards",
    "steps",
    "version",
    "lookahead",
    "members",
    "closing",
    "applied",
    "dropped",
    "refused",
)


def pack(value: Any) -> bytes:
    """Return plain data, members and orders as bytes.

    Raises:
        TypeError: it holds something else.
    """
    packed: bytes = msgpack.packb(value, default=_encode, strict_types=True)
    return packed


def unpack(data: bytes) -> Any:
    """Return what :func:`pack` packed."""
    return msgpack.unpackb(data, ext_hook=_decode, strict_map_key=False)


def state_of(coordinator: Coordinator) -> dict[str, Any]:
    """Return all that :func:`coordinator_from` needs, as plain data and members."""
    following = coordinator.next_policy
    return {
        "own": {name: getattr(coordinator, name) for name in _OF_COORDINATOR},
        "policy": (coordinator.policy.spec, vars(coordinator.policy)),
        "next_policy": following.spec if following is not None else "",
        "ledger": vars(coordinator.ledger),
    }


def coordinator_from(state: dict[str, Any]) -> Coordinator:
    """Return a coordinator that decides as the one of this state would have."""
    spec, attributes = state["policy"]
    policy = make_policy(spec)
    own = state["own"]
    coordinator = Coordinator(policy, shards=own["shards"], workers=0, steps=own["steps"])
    vars(policy).update(attributes)
    vars(coordinator).update(own)
    vars(coordinator.ledger).update(state["ledger"])
    if state["next_policy"]:
        coordinator.next_policy = make_policy(state["next_policy"])
    return coordinator


def _encode(value: Any) -> msgpack.ExtType:
    code = _CODES.get(type(value))
    if code is None:
        raise TypeError(f"{value!r:.80} is no plain data")
    return msgpack.ExtType(code, pack(_KINDS[code][1](value)))


def _decode(code: int, data: bytes) -> Any:
    return _KINDS[code][2](unpack(data))
