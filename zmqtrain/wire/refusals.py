"""Errors over the wire: a refusal carries an error's type and text, nothing else."""

from __future__ import annotations

from zmqtrain import errors
from zmqtrain.errors import RefusedError, ZmqTrainError
from zmqtrain.wire.messages import Refusal

MAX_TEXT = 8192  # characters, which may quote the peer; the decoder refuses longer texts

_ERRORS: dict[str, type[ZmqTrainError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ZmqTrainError)
}


def refusal_of(error: ZmqTrainError) -> Refusal:
    """Return the message that reports this error to a peer; a long text is cut."""
    text = str(error).encode(errors="backslashreplace").decode()  # a path may be no UTF-8
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT - 3]}..."
    return Refusal(type(error).__name__, text)


def error_of(refusal: Refusal, peer: str) -> ZmqTrainError:
    """Return the error that ``peer`` reported; an unknown type becomes a RefusedError."""
    said = f"{peer}: "
    text = refusal.text if refusal.text.startswith(said) else f"{said}{refusal.text}"
    return _ERRORS.get(refusal.error, RefusedError)(text)
