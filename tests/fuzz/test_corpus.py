"""The corpus: an example of each message, and inputs that fuzzing has found."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fuzz import inputs
from zmqtrain.wire.codec import encode

CORPUS = {path.name: path.read_bytes() for path in sorted(inputs.CORPUS.iterdir())}
MADE = {name: content for name, content in CORPUS.items() if not name.startswith("found-")}


@pytest.mark.parametrize("name", CORPUS)
def test_input_keeps_the_laws_of_the_wire_and_is_the_message_that_it_is_named_after(
    name: str,
) -> None:
    frames = inputs.frames_of(CORPUS[name])
    envelope = inputs.check(frames)
    if name not in MADE:
        return
    assert envelope is not None
    assert type(envelope.message).__name__ == name.partition("-")[0]
    assert bool(envelope.tensors) == ("-" in name)
    assert name == "Push-frames" or inputs.joined(encode(envelope)) == CORPUS[name]


def test_bytes_of_every_message_are_those_of_its_protocol_version() -> None:
    assert dict(inputs.examples()) == MADE, (
        "the format of messages has changed: raise PROTOCOL_VERSION in zmqtrain/wire/messages.py, "
        "so that peers of the old format are refused, then run python tests/fuzz/inputs.py"
    )
    assert {kind.__name__ for kind in inputs.KINDS} <= MADE.keys()


def test_each_compression_takes_in_its_own_push() -> None:
    for compression in inputs.COMPRESSIONS:
        content = CORPUS[f"Push-{compression.spec.partition(':')[0]}"]
        out = np.full(max(inputs.SIZES), inputs.MARK, np.float32)
        compression.decode(inputs.check(inputs.frames_of(content)).tensors, out)
        assert not (out == inputs.MARK).any()
