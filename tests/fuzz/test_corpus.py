"""The fuzzer's corpus, without a fuzzer: each input keeps the laws that fuzzing looks for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import inputs
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.codec import Envelope

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


def _raise(error: Exception) -> Callable[..., None]:
    def broken(*_: object) -> None:
        raise error

    return broken


def _fill_and_refuse(tensors: object, out: np.ndarray) -> None:
    out.fill(0)
    raise ProtocolError("too late")


@pytest.mark.parametrize(
    ("target", "broken"),
    [
        ("request_id_of", lambda frames: -1),
        ("decode", _raise(KeyError("kind"))),
        ("decode", _raise(ProtocolError("x" * 500))),
        ("encode", lambda envelope: [b""]),
        ("chunks.take_in", _raise(IndexError())),
        ("chunks.take_in", _fill_and_refuse),
    ],
)
def test_broken_promise_is_an_error(
    monkeypatch: pytest.MonkeyPatch, target: str, broken: Callable[..., object]
) -> None:
    holder: object = inputs
    *path, name = target.split(".")
    for step in path:
        holder = getattr(holder, step)
    monkeypatch.setattr(holder, name, broken)
    with pytest.raises((AssertionError, LookupError, ProtocolError)):
        inputs.check(inputs.frames_of(CORPUS["Push-int8"]))


def test_message_that_changes_on_the_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, seen = inputs.decode, []

    def forgetful(frames: list[bytes]) -> Envelope:
        envelope = decode(frames)
        if seen:
            envelope.tensors = (Tensor.of(np.zeros(20, np.float32)),)
        seen.append(envelope)
        return envelope

    monkeypatch.setattr(inputs, "decode", forgetful)
    with pytest.raises(AssertionError):
        inputs.check(inputs.frames_of(CORPUS["Push-float32"]))
