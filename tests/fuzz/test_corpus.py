"""The corpus: an example of each message, and inputs that fuzzing has found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import inputs

CORPUS = {path.name: path.read_bytes() for path in sorted(inputs.CORPUS.iterdir())}
MADE = {name: content for name, content in CORPUS.items() if not name.startswith("found-")}


@pytest.mark.parametrize("name", CORPUS)
def test_input_keeps_the_laws_of_the_wire(name: str) -> None:
    inputs.check(inputs.frames_of(CORPUS[name]))


@pytest.mark.parametrize("name", MADE)
def test_made_input_is_the_message_that_it_is_named_after(name: str) -> None:
    envelope = inputs.check(inputs.frames_of(CORPUS[name]))
    assert envelope is not None
    assert type(envelope.message).__name__ == name.partition("-")[0]
    assert bool(envelope.tensors) == ("-" in name)


def test_corpus_holds_what_the_encoder_makes_of_every_message() -> None:
    assert dict(inputs.examples()) == MADE, "renew it by: python tests/fuzz/inputs.py"
    assert {kind.__name__ for kind in inputs.KINDS} <= MADE.keys()


def test_each_compression_takes_in_its_own_push() -> None:
    for compression in inputs.COMPRESSIONS:
        content = CORPUS[f"Push-{compression.spec.partition(':')[0]}"]
        out = np.full(max(inputs.SIZES), inputs.MARK, np.float32)
        compression.decode(inputs.check(inputs.frames_of(content)).tensors, out)
        assert not (out == inputs.MARK).any()


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_frames_come_out_of_an_input_as_they_went_in(frames: list[bytes]) -> None:
    assert inputs.frames_of(inputs.joined(frames)) == frames


@given(st.binary(max_size=100))
def test_any_bytes_are_frames(data: bytes) -> None:
    inputs.check(inputs.frames_of(data))
