from __future__ import annotations

import re

import numpy as np
import pytest

from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import FRAME_NBYTES, Tensor

VALUES = np.arange(6, dtype=np.float32)


def test_parts_are_views_of_the_array() -> None:
    array = np.zeros(FRAME_NBYTES, np.uint8)
    (part,) = Tensor.of(array).parts
    assert np.shares_memory(np.frombuffer(part, np.uint8), array)


def test_strided_array_is_taken_in_c_order() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    assert np.array_equal(Tensor.of(array).array(), array)


def test_parts_are_joined_wherever_they_were_cut() -> None:
    data = VALUES.tobytes()
    tensor = Tensor("<f4", (2, 3), (data[:5], b"", memoryview(data)[5:6], data[6:]))
    assert np.array_equal(tensor.array(), VALUES.reshape(2, 3))


def test_copy_goes_into_the_given_memory() -> None:
    flat = np.zeros(10, np.float32)
    Tensor.of(VALUES).copy_to(flat[2:8])
    assert flat.tolist() == [0, 0, *VALUES, 0, 0]


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (np.zeros(5, np.float32), "<f4 [5]"),
        (np.zeros((6, 1), np.float32), "<f4 [6, 1]"),
        (np.zeros((), np.float32), "<f4 []"),
        (np.zeros(6, np.int32), "<i4 [6]"),
        (np.zeros(3, np.float64), "<f8 [3]"),
        (np.zeros(6, ">f4"), ">f4 [6]"),
    ],
)
def test_array_of_another_dtype_or_shape_is_not_touched(out: np.ndarray, expected: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(f"of <f4 [6], expected {expected}: both")):
        Tensor.of(VALUES).copy_to(out)
    assert not out.any()


def test_strided_target_is_an_error_rather_than_a_copy_lost() -> None:
    with pytest.raises(ValueError, match="C-contiguous arrays only"):
        Tensor.of(VALUES).copy_to(np.zeros(12, np.float32)[::2])
