from __future__ import annotations

import hashlib
import re
from importlib.resources import files

import numpy as np

from zmqtrain.data import Digits
from zmqtrain.models import Data


def test_file_is_the_one_that_its_description_names() -> None:
    folder = files("zmqtrain.data")
    digest = hashlib.sha256((folder / "digits.npz").read_bytes()).hexdigest()
    assert re.findall(r"SHA-256: `(\w+)`", (folder / "digits.md").read_text()) == [digest]


def test_digits_have_the_counts_and_ranges_of_the_source() -> None:
    train, evaluation = Digits().load(None)
    assert isinstance(Digits(), Data)
    assert (len(train), len(evaluation)) == (1438, 359)
    features, labels = (
        np.concatenate(both) for both in zip(train.arrays, evaluation.arrays, strict=True)
    )
    assert (features.dtype, features.shape) == (np.float32, (1797, 64))
    assert (labels.dtype, labels.shape) == (np.int64, (1797,))
    assert (features.min(), features.max()) == (0.0, 1.0)
    np.testing.assert_array_equal(features * 16, np.round(features * 16))
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(labels).tolist() == counts
