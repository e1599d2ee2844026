"""What the holder of a key may say; without keys everyone is who they say they are."""

from __future__ import annotations

from zmqtrain.transport.keys import Owner
from zmqtrain.wire.codec import Envelope
from zmqtrain.wire.messages import (
    Arrived,
    Close,
    Initialize,
    Piece,
    Pull,
    Push,
    RequestSave,
    Save,
    SaveEnded,
    Shutdown,
    SliceFailed,
    SliceWritten,
    SwitchPolicy,
)

_CLIENT = "client"  # a person, whose index is the process's id
_RESERVED: dict[type, tuple[str, ...]] = {
    kind: roles
    for roles, kinds in {
        ("worker",): (Pull, Piece, Push),
        ("chief",): (Initialize, Save, SaveEnded, Close, Shutdown),
        ("ps",): (Arrived, SliceWritten, SliceFailed),
        ("chief", _CLIENT): (SwitchPolicy, RequestSave),
    }.items()
    for kind in kinds
}
"""By whom the messages that change a job may be sent; the others are for everyone with a key."""


def overreach(owner: Owner, envelope: Envelope) -> str:
    """Say what is wrong with an envelope of the holder of this key, "" if nothing is."""
    sender = envelope.sender
    is_own = sender.role == owner.role and (sender.index == owner.index or owner.role == _CLIENT)
    if not is_own:
        return f"the key of {owner} is not that of {sender}: give each task its own secret key"
    roles = _RESERVED.get(type(envelope.message))
    if roles is not None and owner.role not in roles:
        kind = type(envelope.message).__name__
        return f"the key of {owner} does not allow {kind}, which is for a {' or '.join(roles)}"
    return ""
