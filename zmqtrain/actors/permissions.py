"""What a task may say by its role; who has a key speaks in its own name, others in any."""

from __future__ import annotations

from zmqtrain.errors import RefusedError
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
    RequestStop,
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
        ("chief", _CLIENT): (SwitchPolicy, RequestSave, RequestStop),
    }.items()
    for kind in kinds
}
"""By whom the messages that change a job may be sent; the others are for everyone."""


def check_identity(owner: Owner, sender: Sender) -> None:
    """Check that the holder of a key is this sender.

    Raises:
        RefusedError: it is the key of somebody else.
    """
    is_own = sender.role == owner.role and (sender.index == owner.index or owner.role == _CLIENT)
    if not is_own:
        raise RefusedError(
            f"the key of {owner} is not that of {sender}: give each task its own secret key"
        )


def check_permission(envelope: Envelope) -> None:
    """Check that a message may be sent by a task of its sender's role.

    Raises:
        RefusedError: it is for others.
    """
    roles = _RESERVED.get(type(envelope.message))
    if roles is not None and envelope.sender.role not in roles:
        kind = type(envelope.message).__name__
        raise RefusedError(
            f"{envelope.sender} may not send {kind}, which is for a {' or '.join(roles)}"
        )
