"""TensorFlow's Example, from bytes as TensorFlow writes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("google.protobuf")

from zmqtrain.data import parse_example
from zmqtrain.errors import DataError

GOLDEN = bytes.fromhex(
    "0a4e"
    "0a0f 0a036e6577 1208 12060a040000c03f"  # new: 1.5
    "0a11 0a0474657874 1209 0a070a01610a026262"  # text: a, bb
    "0a19 0a03616765 1212 1a100a0eac0205ffffffffffffffffff010a"  # age: 300, 5, -1, 10
    "0a0d 0a046e6f6e65 1205 1a03 0a0100"  # none: 0
)


def test_golden_bytes_are_read() -> None:
    found = parse_example(GOLDEN)
    assert found.keys() == {"new", "text", "age", "none"}
    for name, dtype, values in [
        ("new", np.float32, [1.5]),
        ("age", np.int64, [300, 5, -1, 10]),
        ("none", np.int64, [0]),
    ]:
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], values)
    assert found["text"] == [b"a", b"bb"]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("", None), ("0a00", None), ("1200", np.float32), ("1a00", np.int64)]
)
def test_empty_feature_has_no_values(kind: str, dtype: type | None) -> None:
    entry = bytes.fromhex("0a0161 12") + bytes([len(kind) // 2]) + bytes.fromhex(kind)
    part = b"\x0a" + bytes([len(entry)]) + entry
    found = parse_example(b"\x0a" + bytes([len(part)]) + part)
    assert found.keys() == {"a"}
    assert len(found["a"]) == 0
    assert getattr(found["a"], "dtype", None) == dtype


@given(
    st.binary(max_size=30)
    | st.builds(lambda cut: GOLDEN[:cut], st.integers(1, len(GOLDEN) - 1))
    | st.builds(
        lambda place, bit: GOLDEN[:place] + bytes([GOLDEN[place] ^ 1 << bit]) + GOLDEN[place + 1 :],
        st.integers(0, len(GOLDEN) - 1),
        st.integers(0, 7),
    )
)
def test_any_bytes_are_features_or_a_data_error(record: bytes) -> None:
    try:
        found = parse_example(record)
    except DataError:
        return
    assert all(isinstance(name, str) for name in found)


def test_sequence_example_is_refused_and_not_cut_to_its_context() -> None:
    lists = bytes.fromhex("120b 0a09 0a0178 1204 0a02 0a00".replace(" ", ""))
    with pytest.raises(DataError, match=r"is a SequenceExample; expected an Example"):
        parse_example(GOLDEN + lists)
    assert parse_example(GOLDEN + bytes.fromhex("1200")).keys() == parse_example(GOLDEN).keys()
