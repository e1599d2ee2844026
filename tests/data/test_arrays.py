from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqtrain.data import ArrayDataset, Arrays, Digits, Holdout, Mnist, split
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models import Data, Dataset


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


def test_arrays_by_name_are_batches_by_name() -> None:
    named = {"x": np.arange(4), "y": np.arange(4.0)}
    data = Arrays(named, named)
    assert data.load(None)[1].take(np.array([3])) == {"x": [3], "y": [3.0]}
    dataset = "Named(('x', 'y'), ArrayDataset(int64 (4,), float64 (4,)))"
    assert repr(data) == f"Arrays(train={dataset}, evaluation={dataset})"
    assert repr(Arrays({"x": [1, 2]})) == (
        "Arrays(train=Named(('x',), ArrayDataset(list)), evaluation=None)"
    )
    assert len(Holdout(named, 0.25).load(None)[1]) == 1


def labels_of(dataset: Any) -> Any:
    return dataset.take(np.arange(len(dataset)))[-1].tolist()


SPLITS: dict[str, Callable[..., Any]] = {
    "split": lambda holdout=0.2, seed=0: split((ROWS, ROWS), holdout, seed),
    "Holdout": lambda holdout=0.2, seed=0: Holdout((ROWS, ROWS), holdout, seed).load(None),
    "Digits": lambda **options: Digits(**options).load(None),
}
ROWS = np.arange(50)


@pytest.mark.parametrize("split_of", SPLITS.values(), ids=SPLITS)
def test_fraction_that_the_seed_chooses_is_held_out(split_of: Callable[..., Any]) -> None:
    """``split`` and ``Holdout`` lose no example; those of Digits have no numbers."""
    train, held_out = split_of(holdout=0.3, seed=1)
    count = len(train) + len(held_out)
    assert len(held_out) == round(0.3 * count)
    assert labels_of(held_out) == labels_of(split_of(holdout=0.3, seed=1)[1])
    assert labels_of(held_out) != labels_of(split_of(holdout=0.3, seed=2)[1])
    if count == len(ROWS):
        assert sorted(labels_of(train) + labels_of(held_out)) == ROWS.tolist()


@pytest.mark.parametrize("make", [Mnist, Digits, partial(Holdout, (ROWS,)), SPLITS["split"]])
def test_split_that_cannot_be_is_refused_before_loading(make: Any) -> None:
    name = "fraction" if isinstance(make, partial) else "holdout"
    for fraction in (0, 1, -0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=f"holdout is {fraction}; expected a fraction"):
            make(**{name: fraction})
    with pytest.raises(ConfigError, match="seed is -1; expected an int"):
        make(seed=-1)


@pytest.mark.parametrize(("examples", "fraction"), [(1, 0.5), (2, 0.01), (3, 0.99), (0, 0.2)])
def test_split_that_leaves_a_set_empty_is_refused(examples: int, fraction: float) -> None:
    with pytest.raises(DataError, match=f"holding out {fraction} of {examples} examples leaves"):
        split((np.zeros(examples),), fraction, 0)


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
