"""Compression of gradients on their way to a ps: spec, encoding, error feedback.

The error of 16-bit floats is a fraction of each element. 8-bit integers and top-k lose more: small
elements beside large ones vanish entirely, so what was lost is kept and added to the next
gradient (:class:`Compressor`).
"""

from __future__ import annotations

from collections.abc import Callable

from zmqtrain.errors import ConfigError
from zmqtrain.wire.compression.base import Compression
from zmqtrain.wire.compression.feedback import Compressor, Decompressor
from zmqtrain.wire.compression.halves import Bf16, Fp16
from zmqtrain.wire.compression.int8 import MAX_BLOCK, MIN_BLOCK, Int8
from zmqtrain.wire.compression.topk import MAX_RATIO, TopKCompression

__all__ = ["FORMS", "Compression", "Compressor", "Decompressor", "make_compression"]

FORMS = "none, fp16, bf16, int8, int8:block=B, topk or topk:ratio=R"


def make_compression(spec: str) -> Compression | None:
    """Return the compression that ``spec`` asks for, None for "none".

    Raises:
        ConfigError: no compression has this name, or its option is wrong.
    """
    name, colon, option = spec.strip().partition(":")
    if name not in _BUILT_IN:
        raise ConfigError(f"unknown compression {spec!r}: expected {FORMS}")
    make, key, default = _BUILT_IN[name]
    try:
        if colon and not (key and option.startswith(f"{key}=")):
            expected = f"expected {key}=" if key else "it takes none"
            raise ValueError(f"unknown option {option!r:.80}, {expected}")
        return make(option.partition("=")[2] if colon else default)
    except ValueError as error:
        raise ConfigError(f"compression {spec!r}: {error}; the forms are {FORMS}") from None


def _int8(text: str) -> Compression:
    block = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not MIN_BLOCK <= block <= MAX_BLOCK:
        raise ValueError(
            f"a scale for each block of {text!r} elements, expected a whole number from "
            f"{MIN_BLOCK} to {MAX_BLOCK}"
        )
    return Int8(block)


def _topk(text: str) -> Compression:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= MAX_RATIO:
        raise ValueError(
            f"the share {text!r} of the elements, expected a number above 0 and at most "
            f"{MAX_RATIO}, beyond which more bytes would be sent than without compression"
        )
    return TopKCompression(ratio)


_BUILT_IN: dict[str, tuple[Callable[[str], Compression | None], str, str]] = {
    "none": (lambda _: None, "", ""),
    "fp16": (lambda _: Fp16(), "", ""),
    "bf16": (lambda _: Bf16(), "", ""),
    "int8": (_int8, "block", "256"),
    "topk": (_topk, "ratio", "0.01"),
}
"""The maker of each, from its option's value; the option's name, and its default."""
