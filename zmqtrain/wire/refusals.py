"""Errors over the wire: a refusal carries an error's type and text, nothing else."""

from __future__ import annotations

from zmqtrain import errors
from zmqtrain.errors import RefusedError, ZmqTrainError
from zmqtrain.wire.messages import Refusal

_ERRORS: dict[str, type[ZmqTrainError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ZmqTrainError)
}


def refusal_of(error: ZmqTrainError) -> Refusal:
    """Return the message that tells a peer of this error."""
    return Refusal(type(error).__name__, str(error))


def error_of(refusal: Refusal, peer: str) -> ZmqTrainError:
    """Return the error that ``peer`` told of; one unknown here becomes a RefusedError."""
    return _ERRORS.get(refusal.error, RefusedError)(f"{peer}: {refusal.text}")
