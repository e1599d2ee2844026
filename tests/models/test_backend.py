from __future__ import annotations

import numpy as np

from zmqtrain.models.backend import Scratch, array_module


def test_numpy_arrays_numbers_and_nothing_belong_to_numpy() -> None:
    assert array_module() is np
    assert array_module(np.zeros(2), 3.0, np.float32(1)) is np


def test_scratch_is_reused_for_the_same_request_only() -> None:
    scratch, like = Scratch(), np.zeros(1, np.float32)
    first = scratch.arrays(like, 3, (4, 5))
    assert [(a.shape, a.dtype) for a in first] == [((3, 4), np.float32), ((3, 5), np.float32)]
    assert scratch.arrays(like, 3, (4, 5)) is first
    assert scratch.arrays(like, 2, (4, 5))[0].shape == (2, 4)
    assert scratch.arrays(like.astype(np.float64), 2, (4, 5))[0].dtype == np.float64
