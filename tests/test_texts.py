"""Peers' texts cannot forge a line, hide a part of it, or drive a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.texts import MOST_SHOWN, printable, printable_lines


@given(st.text(), st.text())
def test_shown_text_is_one_printable_line_and_tells_texts_apart(text: str, other: str) -> None:
    shown = printable(text)
    assert shown.isprintable() and len(shown.splitlines()) <= 1
    shown.encode()  # surrogates of a file's name are escaped
    if text.isprintable():
        assert shown == text
        assert printable_lines(text) == text


def test_unseen_characters_are_shown_as_escapes() -> None:
    assert printable("a\r\n\x1b]0;t\x07 \u202eb \x9b31m \udcff é 字") == (
        r"a\r\n\x1b]0;t\x07 \u202eb \x9b31m \udcff é 字"
    )


def test_end_of_a_long_text_is_its_length() -> None:
    shown = printable("x" * (MOST_SHOWN + 5))
    assert shown == "x" * MOST_SHOWN + "... (5 more characters)"


@given(st.text(alphabet="a \n\r\x1b\x85\u2028"))
def test_lines_after_the_first_are_indented(text: str) -> None:
    first, *others = printable_lines(text).split("\n")
    assert first == printable(text.split("\n")[0])
    assert len(others) == text.count("\n")
    for line in others:
        assert line.startswith(" ") and line.isprintable()
