from __future__ import annotations

import pytest

from zmqtrain import errors
from zmqtrain.errors import ConfigError, RefusedError, ZmqTrainError
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import Refusal
from zmqtrain.wire.refusals import MAX_TEXT, error_of, refusal_of

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
    ("text", "arrives"),
    [
        ("x" * MAX_TEXT, "x" * MAX_TEXT),
        ("x" * (MAX_TEXT + 1), "x" * (MAX_TEXT - 3) + "..."),
        ("\U0001f600" * 100_000, "\U0001f600" * (MAX_TEXT - 3) + "..."),  # 4 bytes each
        ("no file a\udcff", "no file a\\udcff"),
        ("\udcff" * 20_000, ("\\udcff" * MAX_TEXT)[: MAX_TEXT - 3] + "..."),
    ],
    ids=["as long as allowed", "longer", "of many bytes", "no UTF-8", "longer and no UTF-8"],
)
def test_text_arrives_whatever_a_peer_or_a_path_put_into_it(text: str, arrives: str) -> None:
    sent = Envelope(refusal_of(RefusedError(text)), Sender("ps", 0), 3)
    assert decode(encode(sent)).message == Refusal("RefusedError", arrives)


@pytest.mark.parametrize(
    "name", ["LocalError", "ExitCode", "IntEnum", "__builtins__", "Exception", ""]
)
def test_name_that_is_no_error_of_zmqtrain_is_a_refusal(name: str) -> None:
    error = error_of(Refusal(name, "no"), "ps 1")
    assert type(error) is RefusedError
    assert str(error) == "ps 1: no"


def test_peer_that_names_itself_is_named_once() -> None:
    assert str(error_of(Refusal("CheckpointError", "ps 1: no space"), "ps 1")) == "ps 1: no space"
    assert str(error_of(Refusal("CheckpointError", "ps 2: no"), "ps 0")) == "ps 0: ps 2: no"


def test_error_unknown_to_the_peer_arrives_as_a_refusal() -> None:
    assert type(error_of(refusal_of(LocalError("no")), "ps 0")) is RefusedError
