"""Fingerprints of a job: texts that must be equal on all of its tasks, and their differences."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from zmqtrain.units import counted

EPOCHS = "epochs"
"""Entry of the fingerprint of a job whose batches are those of exact passes."""

DEVICES = "devices"
"""Entry of the fingerprint of a job that names some: how many a worker has."""

WORKERS = "workers"
"""Entry of the fingerprint of a job without ps: how many workers it has."""

INITIAL = "initial"
"""Entry of the fingerprint of a job with such values; one that resumes a checkpoint uses none."""

SOURCE, DATA = "source", "data"
"""Entries of a fingerprint that some tasks lack: the code from which the job was loaded, and the
training set. A job may be made without a file, and a ps loads no data."""

ADDRESS = re.compile(r"( at)? ?\b0x[0-9a-fA-F]{6,}")
"""An address in the repr of an object: it differs from process to process."""

_NAMED = re.compile(r"\w+=.")  # an argument with its value
# A class of the job's file is of __main__ where the file runs as a script.
_MODULE = re.compile(r"(<class '|<)(?:[\w-]+\.)+(?=\w+'>|\w+ object|<locals>)")
_STRING = r"""(?<!\w)[bru]*(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_TOKEN = re.compile(rf"{_STRING}|[][(){{}},]|[^][(){{}},'\"\w]+|\w+|.", re.DOTALL)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def canonical(text: str) -> str:
    """Return a repr that is the same in each process for equal values.

    Addresses and modules of objects without a repr are left out, and the items of a set or a dict,
    in braces, are sorted. Other brackets keep their order.
    """
    text = _MODULE.sub(r"\1", ADDRESS.sub("", text))
    opened: list[tuple[str, list[str]]] = [("", [""])]  # brackets, with their parts so far
    for token in _TOKEN.findall(text):
        bracket, parts = opened[-1]
        if token in _CLOSING:
            opened.append((token, [""]))
        elif token == _CLOSING.get(bracket):
            opened.pop()
            kept = sorted(part.strip() for part in parts) if bracket == "{" else parts
            separator = ", " if bracket == "{" else ","
            opened[-1][1][-1] += f"{bracket}{separator.join(kept)}{token}"
        elif token == ",":
            parts.append("")
        else:
            parts[-1] += token
    return ",".join(opened[0][1]) if len(opened) == 1 else text


def changes_since(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the differences of a job that resumes a checkpoint; "" if there are none.

    Steps, epochs, placement and workers may differ. Older checkpoints lack some entries.
    """
    may_differ = {"steps", EPOCHS, "placement", WORKERS, INITIAL}
    names = sorted((then.keys() & now.keys()) - may_differ)
    return "; ".join(
        f"{name}: another than then"
        if name in (SOURCE, DATA)
        else f"{name}: {_differing(then[name], now[name], 'then', 'now')}"
        for name in names
        if then[name] != now[name]
    )


def fingerprint_difference(
    theirs: Mapping[str, str], ours: Mapping[str, str], there: str = "there", here: str = "here"
) -> str:
    """Return the differences between two fingerprints; "" if they are equal.

    :data:`SOURCE` and :data:`DATA` are compared only if both sides have them.
    """
    return "; ".join(
        f"{name}: {_differing(theirs.get(name, ''), ours.get(name, ''), there, here)}"
        for name in _that_differ(theirs, ours)
    )


def _differing(theirs: str, ours: str, there: str, here: str) -> str:
    """Return how two texts differ; for calls with the same arguments, those with other values."""
    parts = [re.split(r"[][(){},]", text) for text in (theirs, ours)]
    pairs = [(a.strip(), b.strip()) for a, b in zip(*parts, strict=False) if a != b]
    is_named = all(_NAMED.match(part) for pair in pairs for part in pair)
    if pairs and is_named and len(parts[0]) == len(parts[1]):
        theirs, ours = map(", ".join, zip(*pairs, strict=True))
    return f"{theirs or 'nothing'} {there}, {ours or 'nothing'} {here}"


def remedy_of_difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return the remedy for two tasks whose fingerprints differ."""
    if set(_that_differ(theirs, ours)) <= {"parameters", "state", "frozen"}:
        return (
            "One job has built two models: let its seed alone decide their shapes and values, and "
            "install the same versions on every host"
        )
    differing = set(_that_differ(theirs, ours))
    if theirs.get(SOURCE) and theirs.get(SOURCE) == ours.get(SOURCE):
        if differing == {DATA}:
            return (
                "One job has made two data sets: give what is random in them a fixed seed, and "
                "sort what comes from a set"
            )
        if differing <= {"model", "optimizer"}:
            return (
                "One job file has made both: give the object a __repr__ that shows its options "
                "alone, in a fixed order, and give every task the same options"
            )
    same = "Start every task with the same job file, data and options"
    if DATA in differing:
        return f"{same}; data made at random needs a seed, as in numpy.random.default_rng(0)"
    return same


def _that_differ(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    one_sided = theirs.keys() ^ ours.keys()
    names = (theirs.keys() | ours.keys()) - ({SOURCE, DATA} & one_sided)
    return sorted(name for name in names if theirs.get(name) != ours.get(name))


def epochs_text(epochs: int, steps: int) -> str:
    """Return "5 epochs of 100 batches", without batches if ``steps`` is 0; "" without epochs."""
    each = f" of {steps} {'batch' if steps == 1 else 'batches'}" if steps else ""
    return f"{counted(epochs, 'epoch')}{each}" if epochs else ""


def digest_of_arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return a digest of named arrays; "" of none."""
    digest = hashlib.blake2b(digest_size=6)
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.name} {array.shape};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest() if arrays else ""


def in_short(value: Any) -> str:
    """Return a value in one line of at most 80 characters; of an array or a module its type."""
    text = " ".join(repr(value).split())
    if not isinstance(value, str) and (len(text) > 80 or ADDRESS.search(text)):
        return f"of type {type(value).__name__}"
    return text[:80]


def short(text: str) -> str:
    """Return a text as an entry: the end of a long one as its digest."""
    return text if len(text) <= 400 else f"{text[:380]}... {digest_of(text.encode())}"


def digest_of(text: bytes) -> str:
    """Return a digest in 12 hexadecimal digits."""
    return hashlib.blake2b(text, digest_size=6).hexdigest()
