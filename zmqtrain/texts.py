"""Texts of peers and files as people see them: none forges a line or drives a terminal."""

from __future__ import annotations

MOST_SHOWN = 10_000
"""Characters of one text that are shown."""


def printable(text: str, most: int = MOST_SHOWN) -> str:
    """Return a text in one line, with escapes for control, direction and other unseen characters.

    Of a text longer than ``most`` characters the first ones are kept.
    """
    if len(text) > most:
        text = f"{text[:most]}... ({len(text) - most} more characters)"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def printable_lines(text: str) -> str:
    """Return a text whose lines are printable and, but for the first one, indented."""
    first, *others = text.split("\n")
    shown = (line if line.startswith(" ") else f"  {line}" for line in others)
    return "\n".join(map(printable, (first, *shown)))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
