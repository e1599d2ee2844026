"""Numbers with units, tables, JSON."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.cli.output import cell, show_json, table, text_of
from zmqtrain.units import data_size, duration, shortened


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (0.0421, "42 ms"),
        (1.0, "1.0 s"),
        (9.94, "9.9 s"),
        (10.0, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (185.0, "3 min 5 s"),
        (3599.9, "1 h 0 min"),
        (7500.0, "2 h 5 min"),
        (90000.0, "1 d 1 h"),
    ],
)
def test_duration_has_the_units_that_matter(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_many_texts_are_shortened_to_the_first_and_the_last_ones() -> None:
    assert shortened(["a", "b"]) == "a, b"
    assert shortened(list("abcd"), 4) == "a, b, c, d"
    assert shortened(list("abcdef"), 4) == "a, b, ..., e, f (6 in all)"


@given(st.integers(0, 10**14))
def test_data_size_is_right_to_its_last_digit(nbytes: int) -> None:
    number, unit = data_size(nbytes).split()
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(number) < 1000 or unit == "TB"
    assert abs(float(number) * factor - nbytes) <= 0.0501 * factor


def test_table_is_aligned_and_has_no_blanks_at_its_line_ends() -> None:
    rows = table("name", "bytes", "note", right=("bytes",))
    rows.add_row(cell("a"), cell(7), cell(""))
    rows.add_row(cell("long name"), cell(12345), cell("whole"))
    assert text_of(rows) == ("name       bytes  note\na              7\nlong name  12345  whole\n")


@given(st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S")), min_size=1))
def test_text_of_a_peer_is_shown_unchanged(text: str) -> None:
    assert text_of(cell(text), width=10_000) == f"{text}\n"


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.recursive(numbers | st.text() | st.none(), lambda inner: st.lists(inner)))
def test_json_has_no_nan_and_is_one_line(value: Any) -> None:
    out = StringIO()
    with redirect_stdout(out):
        show_json({"value": value, "pair": (1, float("nan"))})
    assert out.getvalue().count("\n") == 1
    assert not re.search(r"\b(NaN|Infinity)\b", re.sub(r'"(\\.|[^"\\])*"', "", out.getvalue()))
    assert json.loads(out.getvalue())["pair"] == [1, None]
