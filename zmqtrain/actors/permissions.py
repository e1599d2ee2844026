"""What a task may say by its role; who has a key speaks in its own name, others in any."""

from __future__ import annotations

from zmqtrain.transport.keys import Owner
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import (
    Arrived,
    Chunk,
    Close,
    Initialize,
    Pull,
    Push,
    RequestSave,
    Save,
    SaveEnded,
    ShardFailed,
    ShardReport,
    ShardWritten,
    Shutdown,
    SwitchPolicy,
)

_CLIENT = "client"  # a person, whose index is the process's id
_RESERVED: dict[type, tuple[str, ...]] = {
    kind: roles
    for roles, kinds in {
        ("worker",): (Pull, Chunk, Push),
        ("chief",): (Initialize, Save, SaveEnded, Close, Shutdown),
        ("ps",): (Arrived, ShardReport, ShardWritten, ShardFailed),
        ("chief", _CLIENT): (SwitchPolicy, RequestSave),
    }.items()
    for kind in kinds
}
"""By whom the messages that change a job may be sent; the others are for everyone."""


def identity_error(owner: Owner, sender: Sender) -> str:
    """Say what is wrong with the holder of this key being this sender, "" if nothing is."""
    if sender.role == owner.role and (sender.index == owner.index or owner.role == _CLIENT):
        return ""
    return f"the key of {owner} is not that of {sender}: give each task its own secret key"


def permission_error(envelope: Envelope) -> str:
    """Say what is wrong with such a message of such a sender, "" if nothing is."""
    roles = _RESERVED.get(type(envelope.message))
    if roles is None or envelope.sender.role in roles:
        return ""
    kind = type(envelope.message).__name__
    return f"{envelope.sender} may not send {kind}, which is for a {' or '.join(roles)}"
