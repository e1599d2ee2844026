from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqtrain.data import ArrayDataset, Arrays, Holdout, split
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models import Data, Dataset


def test_take_returns_the_rows_in_the_order_asked_for() -> None:
    dataset = ArrayDataset(np.arange(10).reshape(5, 2), np.arange(5))
    features, labels = dataset.take(np.array([4, 0, 4]))
    np.testing.assert_array_equal(features, [[8, 9], [0, 1], [8, 9]])
    np.testing.assert_array_equal(labels, [4, 0, 4])
    assert len(dataset) == 5


def test_writing_into_a_batch_does_not_change_the_data_set() -> None:
    dataset = ArrayDataset(np.zeros(3))
    dataset.take(np.array([0, 1, 2]))[0][:] = 1
    assert not dataset.arrays[0].any()


@pytest.mark.parametrize(
    "arrays", [(), (np.float32(1),), (np.zeros(3), np.zeros(2)), (np.zeros(3), np.zeros((2, 3)))]
)
def test_arrays_without_common_rows_are_refused(arrays: tuple[Any, ...]) -> None:
    shapes = [array.shape for array in arrays]
    with pytest.raises(DataError) as caught:
        ArrayDataset(*arrays)
    assert str(caught.value) == (
        f"a data set of arrays with the shapes {shapes}; expected at least one array, all with "
        "the same number of rows; give one row for each example in every array"
    )


def test_arrays_load_as_they_were_given() -> None:
    data = Arrays(train=(np.arange(4), np.arange(4.0)), evaluation=(np.arange(2), np.arange(2.0)))
    train, evaluation = data.load(None)
    assert isinstance(data, Data)
    assert isinstance(train, Dataset)
    np.testing.assert_array_equal(train.take(np.array([3]))[1], [3.0])
    assert (len(train), len(evaluation)) == (4, 2)


def test_representations_show_types_and_shapes_but_no_values() -> None:
    features, labels = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    assert repr(ArrayDataset(features, labels)) == "ArrayDataset(float32 (4, 2), int64 (4,))"
    assert repr(Arrays((features, labels), (features[:1], labels[:1]))) == (
        "Arrays(train=(float32 (4, 2), int64 (4,)), evaluation=(float32 (1, 2), int64 (1,)))"
    )


def test_split_holds_out_the_fraction_and_loses_no_example() -> None:
    rows = np.arange(50)
    train, held_out = split((rows, rows * 2), fraction=0.3, seed=1)
    assert (len(train), len(held_out)) == (35, 15)
    np.testing.assert_array_equal(
        np.sort(np.concatenate([train.arrays[0], held_out.arrays[0]])), rows
    )
    for part in (train, held_out):
        np.testing.assert_array_equal(part.arrays[0] * 2, part.arrays[1])


def test_split_depends_on_the_seed_alone() -> None:
    rows = np.arange(50)
    one, same, other = (split((rows,), 0.2, seed)[1].arrays[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(np.sort(one), np.sort(other))


@pytest.mark.parametrize(("examples", "fraction"), [(1, 0.5), (2, 0.01), (3, 0.99), (0, 0.2)])
def test_split_that_leaves_a_set_empty_is_refused(examples: int, fraction: float) -> None:
    with pytest.raises(DataError, match=f"holding out {fraction} of {examples} examples leaves"):
        split((np.zeros(examples),), fraction, 0)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_split_by_no_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=f"holdout is {fraction}; expected a fraction between"):
        split((np.zeros(10),), fraction, 0)


def test_held_out_examples_are_not_trained() -> None:
    data = Holdout((np.arange(50),), 0.3, seed=1)
    train, held_out = data.load(None)
    assert isinstance(data, Data)
    assert (len(train), len(held_out)) == (35, 15)
    rows = [part.take(np.arange(len(part)))[0] for part in (train, held_out)]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(50))


def test_file_of_an_array_is_mapped_and_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))
    dataset, _ = Arrays((tmp_path / "x.npy", np.arange(3))).load(None)
    assert isinstance(dataset.arrays[0], np.memmap)
    batch = dataset.take(np.array([2]))
    assert type(batch[0]) is np.ndarray
    np.testing.assert_array_equal(batch[0], [[4, 5]])


def test_mapped_file_that_shrinks_is_a_data_error_before_it_kills_the_process(
    tmp_path: Path,
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1000, 100)))
    dataset, _ = Arrays((tmp_path / "x.npy",)).load(None)
    with (tmp_path / "x.npy").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(DataError, match=r"x\.npy has 5000 bytes"):
        dataset.take(np.array([999]))


@pytest.mark.parametrize("content", [None, b"", b"text", np.array([object()])])
def test_file_that_is_no_array_is_named(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(DataError, match=r"x\.npy: cannot be read"):
        Arrays((path,)).load(None)
