"""Coverage-guided fuzzing of the decoder: `make fuzz SECONDS=60`.

The arguments are libFuzzer's. An input that breaks a promise of the wire is written to a file and
its traceback shown; `python tests/fuzz/fuzz_codec.py FILE` shows it again.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import atheris
import msgpack

with atheris.instrument_imports(include=["zmqtrain"]):
    import inputs

KIND_NAMES = [kind.__name__ for kind in inputs.KINDS]
NUMBERS = [-(2**63), -1, 0, 1, 2, 255, 2**31, 2**63 - 1, 2**64 - 1, 0.5, -0.0, 1e308]
NUMBERS += [float("nan"), float("inf")]
TEXTS = [*KIND_NAMES, "", "x" * 300, "\0", "<f2", "<f4", "<f8", "<i4", "|i1", "|u1", ">f4", "|O"]
OTHERS = [None, True, False, b"", b"\0\0\x80\x7f", [], [[]], [0], {}, {"": 0}, {"key": []}]


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change a value of the header or a frame as a whole, or bytes wherever they are.

    Bytes alone rarely leader on to another header: most of their changes are no msgpack any more.
    """
    dice = random.Random(seed)
    frames = [bytes(frame) for frame in inputs.frames_of(data)]
    match dice.choice(["header", "header", "frames", "bytes"]):
        case "header" if frames:
            try:
                frames[0] = msgpack.packb(_changed(msgpack.unpackb(frames[0]), dice))
            except (ValueError, RecursionError, msgpack.UnpackException):
                return atheris.Mutate(data, max_size)
        case "frames" if frames:
            _change_frames(frames, dice)
        case _:
            return atheris.Mutate(data, max_size)
    changed = inputs.joined(frames)
    return changed if len(changed) <= max_size else data


def _changed(header: Any, dice: random.Random) -> Any:
    """Return a header with one of its values replaced, left out, repeated or put elsewhere."""
    place = header
    while True:
        if not isinstance(place, list | dict) or not place:
            return [header]
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = dice.choice(keys)
        if not isinstance(place[key], list | dict) or not place[key] or dice.random() < 0.2:
            break
        place = place[key]
    if isinstance(place, dict):
        place[dice.choice([key, *TEXTS])] = _other(place[key], dice)
        return header
    match dice.choice(["replace", "replace", "replace", "delete", "repeat", "copy"]):
        case "replace":
            place[key] = _other(place[key], dice)
        case "delete":
            del place[key]
        case "repeat":
            place[key:key] = [place[key]] * dice.choice([1, 1, 2, 70])
        case "copy":
            place[key] = place[dice.randrange(len(place))]
    return header


def _other(value: Any, dice: random.Random) -> Any:
    if isinstance(value, bytes) and dice.random() < 0.7:
        return atheris.Mutate(value, len(value) + dice.randrange(8))
    if isinstance(value, int) and dice.random() < 0.5:
        return max(-(2**63), min(value + dice.choice([-1, 1, 20]), 2**64 - 1))
    return dice.choice([*NUMBERS, *TEXTS, *OTHERS])


def _change_frames(frames: list[bytes], dice: random.Random) -> None:
    at = dice.randrange(len(frames))
    match dice.choice(["delete", "repeat", "cut", "swap", "grow"]):
        case "delete":
            del frames[at]
        case "repeat":
            frames.insert(at, frames[at])
        case "cut":
            frames[at] = frames[at][: dice.randrange(len(frames[at]) + 1)]
        case "swap":
            other = dice.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
        case "grow":
            frames[at] += dice.randbytes(dice.choice([1, 4, 80]))


def main() -> None:
    """Fuzz until libFuzzer's limits are reached."""
    atheris.Setup(
        sys.argv, lambda data: inputs.check(inputs.frames_of(data)), custom_mutator=mutate
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
