from __future__ import annotations

import pytest

from zmqtrain import errors
from zmqtrain.errors import ConfigError, RefusedError, ZmqTrainError
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import Refusal
from zmqtrain.wire.refusals import error_of, refusal_of

ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ZmqTrainError)
]


class LocalError(ConfigError):
    """Known to one side alone."""


@pytest.mark.parametrize("kind", ERRORS)
def test_error_is_raised_with_its_type_at_the_peer(kind: type[ZmqTrainError]) -> None:
    sent = Envelope(refusal_of(kind("lr is -1, expected more")), Sender("ps", 0), 3)
    received = decode(encode(sent)).message
    error = error_of(received, "ps 0")
    assert type(error) is kind
    assert str(error) == "ps 0: lr is -1, expected more"


@pytest.mark.parametrize(
    "name", ["LocalError", "ExitCode", "IntEnum", "__builtins__", "Exception", ""]
)
def test_name_that_is_no_error_of_zmqtrain_is_a_refusal(name: str) -> None:
    error = error_of(Refusal(name, "no"), "ps 1")
    assert type(error) is RefusedError
    assert str(error) == "ps 1: no"


def test_error_unknown_to_the_peer_arrives_as_a_refusal() -> None:
    assert type(error_of(refusal_of(LocalError("no")), "ps 0")) is RefusedError
