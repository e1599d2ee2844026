"""The messages that each role may send. The holder of a key sends in its own name only."""

from __future__ import annotations

from zmqtrain.errors import RefusedError
from zmqtrain.transport.keys import Owner
from zmqtrain.wire import control, messages
from zmqtrain.wire.codec import Envelope, Sender

_CLIENT = "client"  # the command line; its index is a process id
_GRADIENT = (messages.Chunk, messages.RowChunk, messages.Push)
_OF_THE_CHIEF = (
    *(control.EndGeneration, control.Initialize, control.Keep, control.Save),
    *(control.SaveEnded, control.Close, control.Extend, control.SetRate, control.Shutdown),
)
_RESERVED: dict[type, tuple[str, ...]] = {
    kind: roles
    for roles, kinds in {
        ("worker",): (messages.Pull, *_GRADIENT, control.HandedOver),
        ("worker", "chief"): (control.HandOver, messages.Lookup),
        ("worker", "ps"): (control.Evaluated,),  # a ps passes it on
        ("chief", "ps"): (control.Evaluate,),
        ("worker", "ps", "chief"): (control.Gather,),
        ("chief",): _OF_THE_CHIEF,
        ("ps",): (messages.Arrived, messages.ShardReport, control.ShardWritten),
        ("chief", _CLIENT): (control.SwitchPolicy, control.RequestStop),
        # A ps that leaves, and a worker whose own loop saves.
        ("worker", "chief", "ps", _CLIENT): (control.RequestSave,),
    }.items()
    for kind in kinds
}
"""The roles that may send each message that changes a job; all may send the others."""


def may_ask_for_a_client(envelope: Envelope) -> bool:
    """Return whether the holder of any key may send this as a client: it changes nothing."""
    return envelope.sender.role == _CLIENT and type(envelope.message) is control.GetStatus


def check_identity(owner: Owner, sender: Sender, expected: Owner) -> None:
    """Check that a key belongs to this sender, whose key is ``expected``, or is any client's.

    Raises:
        RefusedError: it is another task's key.
    """
    if owner != expected and not owner.role == sender.role == _CLIENT:
        raise RefusedError(
            f"the key of {owner} is not that of {sender}: give each task its own secret key"
        )


def check_permission(envelope: Envelope) -> None:
    """Check that a message may be sent by a task of its sender's role.

    Raises:
        RefusedError: it is for other roles.
    """
    roles = _RESERVED.get(type(envelope.message))
    if roles is not None and envelope.sender.role not in roles:
        kind = type(envelope.message).__name__
        raise RefusedError(
            f"{envelope.sender} may not send {kind}, which is for a {' or '.join(roles)}"
        )
