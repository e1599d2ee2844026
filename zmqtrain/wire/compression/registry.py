"""From a spec string to a compression."""

from __future__ import annotations

from collections.abc import Callable

from zmqtrain.errors import ConfigError
from zmqtrain.wire.compression.base import Compression
from zmqtrain.wire.compression.halves import Bf16, Fp16
from zmqtrain.wire.compression.int8 import MAX_BLOCK, MIN_BLOCK, Int8
from zmqtrain.wire.compression.topk import MAX_RATIO, TopK

FORMS = "none, fp16, bf16, int8, int8:block=B, topk or topk:ratio=R"

DEFAULT_BLOCK = 256
DEFAULT_RATIO = 0.01


def make_compression(spec: str) -> Compression | None:
    """Return the compression that ``spec`` asks for, None for "none".

    Raises:
        ConfigError: no compression has this name, or its option is wrong.
    """
    name, _, option = spec.strip().partition(":")
    factory = _BUILT_IN.get(name)
    if factory is None:
        raise ConfigError(f"unknown compression {spec!r}: expected {FORMS}")
    try:
        return factory(option)
    except ValueError as error:
        raise ConfigError(f"compression {spec!r}: {error}; the forms are {FORMS}") from None


def _without_option(made: Callable[[], Compression | None]) -> Callable[[str], Compression | None]:
    def factory(option: str) -> Compression | None:
        if option:
            raise ValueError(f"it takes no options, got {option!r}")
        return made()

    return factory


def _int8(option: str) -> Compression:
    text = _value(option, "block")
    if text is None:
        return Int8(DEFAULT_BLOCK)
    block = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not MIN_BLOCK <= block <= MAX_BLOCK:
        raise ValueError(
            f"a scale for each block of {text!r} elements, expected a whole number from "
            f"{MIN_BLOCK} to {MAX_BLOCK}"
        )
    return Int8(block)


def _topk(option: str) -> Compression:
    text = _value(option, "ratio")
    if text is None:
        return TopK(DEFAULT_RATIO)
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= MAX_RATIO:
        raise ValueError(
            f"the share {text!r} of the elements, expected a number above 0 and at most "
            f"{MAX_RATIO}, beyond which more bytes would be sent than without compression"
        )
    return TopK(ratio)


def _value(option: str, key: str) -> str | None:
    """Return the text after ``key=``, None if there is no option."""
    if not option:
        return None
    name, equals, value = option.partition("=")
    if name != key or not equals:
        raise ValueError(f"unknown option {option!r}, expected {key}=")
    return value


_BUILT_IN: dict[str, Callable[[str], Compression | None]] = {
    "none": _without_option(lambda: None),
    "fp16": _without_option(Fp16),
    "bf16": _without_option(Bf16),
    "int8": _int8,
    "topk": _topk,
}
