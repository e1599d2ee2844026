from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqtrain.data import Mnist
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models import Data

TRAIN_ROWS, TEST_ROWS = 20, 10


def digits(rows: int, seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (rows, 28, 28), np.uint8), np.arange(rows, dtype=np.uint8) % 10


TRAIN, TEST = digits(TRAIN_ROWS, 0), digits(TEST_ROWS, 1)


def write_idx(path: Path, array: Any) -> None:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 0x08, array.ndim, *array.shape)
    content = header + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_pair(
    folder: Path, name: str, pair: tuple[Any, Any], mark: str = "-", gz: str = ""
) -> None:
    write_idx(folder / f"{name}-images{mark}idx3-ubyte{gz}", pair[0])
    write_idx(folder / f"{name}-labels{mark}idx1-ubyte{gz}", pair[1])


def write_archive(folder: Path, **changes: Any) -> None:
    arrays = {"x_train": TRAIN[0], "y_train": TRAIN[1], "x_test": TEST[0], "y_test": TEST[1]}
    arrays |= changes
    np.savez(folder / "mnist.npz", **{k: v for k, v in arrays.items() if v is not None})


def assert_examples(dataset: Any, pair: tuple[Any, Any]) -> None:
    features, labels = dataset.arrays
    assert (features.dtype, labels.dtype) == (np.float32, np.int64)
    np.testing.assert_allclose(features, pair[0].reshape(-1, 784) / 255, rtol=1e-6)
    np.testing.assert_array_equal(labels, pair[1])


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("mark", ["-", "."])
def test_two_idx_pairs_are_training_and_evaluation(mark: str, gz: str, tmp_path: Path) -> None:
    write_pair(tmp_path, "train", TRAIN, mark, gz)
    write_pair(tmp_path, "t10k", TEST, mark, gz)
    train, evaluation = Mnist().load(str(tmp_path))
    assert isinstance(Mnist(), Data)
    assert_examples(train, TRAIN)
    assert_examples(evaluation, TEST)


def test_archive_of_keras_is_training_and_evaluation(tmp_path: Path) -> None:
    write_archive(tmp_path)
    train, evaluation = Mnist().load(str(tmp_path))
    assert_examples(train, TRAIN)
    assert_examples(evaluation, TEST)


@pytest.mark.parametrize(("name", "pair"), [("train", TRAIN), ("t10k", TEST)])
def test_single_pair_is_split(name: str, pair: tuple[Any, Any], tmp_path: Path) -> None:
    write_pair(tmp_path, name, pair, gz=".gz")
    train, evaluation = Mnist(holdout=0.3, seed=4).load(str(tmp_path))
    held_out = round(0.3 * len(pair[0]))
    order = np.random.Generator(np.random.PCG64(4)).permutation(len(pair[0]))
    assert_examples(evaluation, (pair[0][order[:held_out]], pair[1][order[:held_out]]))
    assert_examples(train, (pair[0][order[held_out:]], pair[1][order[held_out:]]))


def test_a_fifth_is_held_out_by_default(tmp_path: Path) -> None:
    write_pair(tmp_path, "train", TRAIN)
    assert [len(part) for part in Mnist().load(str(tmp_path))] == [16, 4]


EXPECTED = (
    "expected a directory with mnist.npz, or train-images-idx3-ubyte with "
    "train-labels-idx1-ubyte and/or t10k-images-idx3-ubyte with t10k-labels-idx1-ubyte (each may "
    "end in .gz, and -idx may be .idx); give it with --data DIR or ZMQTRAIN_DATA"
)


def test_unset_directory_is_refused_with_the_names_looked_for() -> None:
    with pytest.raises(DataError) as caught:
        Mnist().load(None)
    assert str(caught.value) == f"no data directory is set; {EXPECTED}"


def test_absent_directory_is_refused_with_the_names_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    with pytest.raises(DataError) as caught:
        Mnist().load(str(path))
    assert str(caught.value) == (
        f"the data directory {path} does not exist or is not a directory; {EXPECTED}"
    )


def test_directory_without_the_files_is_refused_with_the_names_looked_for(tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    with pytest.raises(DataError) as caught:
        Mnist().load(str(tmp_path))
    assert str(caught.value) == (
        f"the data directory {tmp_path} holds none of MNIST's files; {EXPECTED}"
    )


@pytest.mark.parametrize(
    ("present", "missing"),
    [("t10k-images-idx3-ubyte", "labels"), ("t10k-labels-idx1-ubyte", "images")],
)
def test_half_a_pair_is_refused_with_the_missing_half(
    present: str, missing: str, tmp_path: Path
) -> None:
    write_pair(tmp_path, "train", TRAIN)
    write_idx(tmp_path / present, TEST[0])
    number = {"images": 3, "labels": 1}[missing]
    stem = f"t10k-{missing}"
    names = [f"{stem}{mark}idx{number}-ubyte{gz}" for mark in "-." for gz in ("", ".gz")]
    with pytest.raises(DataError) as caught:
        Mnist().load(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path / present} has no file of {missing} beside it; expected {' or '.join(names)}; "
        "download that file, too, or remove this one"
    )


IMAGES_EXPECTED = (
    "expected uint8 (n, 28, 28) with n >= 1; put MNIST's files into the data directory"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x_train": TRAIN[0] / 255},
            f"x_train holds float64 (20, 28, 28); {IMAGES_EXPECTED}",
        ),
        (
            {"x_test": TEST[0][:, :8, :8]},
            f"x_test holds uint8 (10, 8, 8); {IMAGES_EXPECTED}",
        ),
        (
            {"x_train": TRAIN[0][:0], "y_train": TRAIN[1][:0]},
            f"x_train holds uint8 (0, 28, 28); {IMAGES_EXPECTED}",
        ),
        (
            {"y_train": TRAIN[1][:-1]},
            (
                "y_train holds uint8 (19,); expected integers (20,), one for each image; "
                "take images and labels of one set"
            ),
        ),
        (
            {"y_test": TEST[1] / 2},
            (
                "y_test holds float64 (10,); expected integers (10,), one for each image; "
                "take images and labels of one set"
            ),
        ),
        (
            {"y_test": TEST[1] + 1},
            (
                "y_test holds labels from 1 to 10; expected 0 to 9; "
                "put MNIST's files into the data directory"
            ),
        ),
        (
            {"y_test": TEST[1].astype(np.int16) - 1},
            (
                "y_test holds labels from -1 to 8; expected 0 to 9; "
                "put MNIST's files into the data directory"
            ),
        ),
    ],
)
def test_archive_of_other_arrays_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_archive(tmp_path, **changes)
    with pytest.raises(DataError) as caught:
        Mnist().load(str(tmp_path))
    assert str(caught.value) == f"{tmp_path / 'mnist.npz'}: {message}"


@pytest.mark.parametrize("damage", ["not a zip", "cut", "flipped", "npy", "pickle", "no y_test"])
def test_archive_that_cannot_be_read_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    write_archive(tmp_path, **{"no y_test": {"y_test": None}}.get(damage, {}))
    content = bytearray(path.read_bytes())
    if damage == "not a zip":
        content = bytearray(b"<html>404</html>")
    elif damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    if damage == "npy":
        with path.open("wb") as file:
            np.save(file, TRAIN[0])
    if damage == "pickle":
        write_archive(tmp_path, y_test=np.array([object()]))
    with pytest.raises(DataError) as caught:
        Mnist().load(str(tmp_path))
    assert str(caught.value).startswith(f"{path}: cannot be read (")
    assert str(caught.value).endswith(
        "expected an npz file with the arrays x_train, y_train, x_test and y_test; "
        "download it again"
    )
    assert "allow_pickle" not in str(caught.value)


def test_damaged_idx_file_is_named(tmp_path: Path) -> None:
    write_pair(tmp_path, "train", TRAIN)
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="train-labels-idx1-ubyte: found 19 bytes of items"):
        Mnist().load(str(tmp_path))


def test_labels_of_another_set_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path, "train", (TRAIN[0], TEST[1]))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte holds uint8 \(10,\); expected"):
        Mnist().load(str(tmp_path))


@pytest.mark.parametrize("options", [{"holdout": 1.0}, {"seed": -1}])
def test_split_that_cannot_be_is_refused_before_loading(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Mnist(**options)
