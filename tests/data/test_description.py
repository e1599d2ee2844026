"""Description of a task's training set, by which other data on another host is noticed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.data import ArrayDataset
from zmqtrain.data.description import describe
from zmqtrain.errors import DataError

FEATURES, LABELS = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4)


def changed(array: Any, row: int) -> Any:
    other = array.copy()
    other[row] += 1
    return other


@pytest.mark.parametrize(
    "arrays",
    [
        (FEATURES[:3], LABELS[:3]),
        (FEATURES, LABELS.astype(np.int32)),
        (FEATURES.reshape(4, 3, 1), LABELS),
        (changed(FEATURES, 0), LABELS),
        (FEATURES, changed(LABELS, -1)),
    ],
    ids=["length", "dtype", "shape", "first example", "last example"],
)
def test_equal_data_is_described_alike_and_other_data_otherwise(arrays: tuple[Any, ...]) -> None:
    text = describe(ArrayDataset(FEATURES, LABELS))
    assert text == describe(ArrayDataset(FEATURES.copy(), LABELS.copy()))
    assert text.startswith("4 examples of float32 [3], int64 [] (")
    assert describe(ArrayDataset(*arrays)) != text


def test_data_that_is_augmented_at_random_is_described_by_its_kind_alone() -> None:
    random = np.random.default_rng(0)

    class Augmented(ArrayDataset):
        def take(self, indices: Any) -> Any:
            features, labels = super().take(indices)
            return features + random.normal(size=features.shape).astype(np.float32), labels

    texts = {describe(Augmented(FEATURES, LABELS)) for _ in range(2)}
    assert len(texts) == 1


def test_dataset_that_raises_is_a_data_error() -> None:
    class Broken(ArrayDataset):
        def take(self, indices: Any) -> Any:
            raise OSError("the disk is gone")

    with pytest.raises(DataError, match="the disk is gone"):
        describe(Broken(FEATURES))
