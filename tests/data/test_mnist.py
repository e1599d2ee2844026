from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqtrain.data import Mnist
from zmqtrain.errors import DataError
from zmqtrain.models import Data

TRAIN_ROWS, TEST_ROWS = 20, 10


def digits(rows: int, seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (rows, 28, 28), np.uint8), np.arange(rows, dtype=np.uint8) % 10


TRAIN, TEST = digits(TRAIN_ROWS, 0), digits(TEST_ROWS, 1)


def idx(array: Any) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 0x08, array.ndim, *array.shape)
    return header + array.tobytes()


def write_pair(
    folder: Path, name: str, pair: tuple[Any, Any], mark: str = "-", gz: str = ""
) -> None:
    for array, kind in zip(pair, (f"images{mark}idx3", f"labels{mark}idx1"), strict=True):
        content = gzip.compress(idx(array)) if gz else idx(array)
        (folder / f"{name}-{kind}-ubyte{gz}").write_bytes(content)


def write_archive(folder: Path, **changes: Any) -> None:
    arrays = {"x_train": TRAIN[0], "y_train": TRAIN[1], "x_test": TEST[0], "y_test": TEST[1]}
    arrays |= changes
    np.savez(folder / "mnist.npz", **{k: v for k, v in arrays.items() if v is not None})


def assert_examples(dataset: Any, pair: tuple[Any, Any]) -> None:
    features, labels = dataset.arrays
    assert (features.dtype, labels.dtype) == (np.float32, np.int64)
    np.testing.assert_allclose(features, pair[0].reshape(-1, 784) / 255, rtol=1e-6)
    np.testing.assert_array_equal(labels, pair[1])


@pytest.mark.parametrize(
    "kind", ["idx -", "idx .", "idx - .gz", "idx . .gz", "archive", "archive itself"]
)
def test_two_sets_are_training_and_evaluation(kind: str, tmp_path: Path) -> None:
    if kind.startswith("idx"):
        _, mark, *ending = kind.split()
        write_pair(tmp_path, "train", TRAIN, mark, *ending)
        write_pair(tmp_path, "t10k", TEST, mark, *ending)
    else:
        write_archive(tmp_path)
    directory = tmp_path / "mnist.npz" if kind == "archive itself" else tmp_path
    train, evaluation = Mnist().load(str(directory))
    assert isinstance(Mnist(), Data)
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


@pytest.mark.parametrize("kind", ["unset", "absent", "of other files"])
def test_directory_without_the_files_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    directory = {"unset": None, "absent": str(tmp_path / "absent"), "of other files": str(tmp_path)}
    with pytest.raises(DataError, match=str(directory[kind] or "no data directory")):
        Mnist().load(directory[kind])


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"x_train": TRAIN[0] / 255}, "x_train holds float64 (20, 28, 28)"),
        ({"x_test": TEST[0][:, :8, :8]}, "x_test holds uint8 (10, 8, 8)"),
        ({"x_train": TRAIN[0][:0], "y_train": TRAIN[1][:0]}, "x_train holds uint8 (0, 28, 28)"),
        ({"y_train": TRAIN[1][:-1]}, "y_train holds uint8 (19,)"),
        ({"y_test": TEST[1] / 2}, "y_test holds float64 (10,)"),
        ({"y_test": TEST[1] + 1}, "y_test holds labels from 1 to 10"),
        ({"y_test": TEST[1].astype(np.int16) - 1}, "y_test holds labels from -1 to 8"),
    ],
)
def test_archive_of_other_arrays_is_refused(
    changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    write_archive(tmp_path, **changes)
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'mnist.npz'}: {found}")):
        Mnist().load(str(tmp_path))


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
    with pytest.raises(DataError, match=f"{path}: cannot be read"):
        Mnist().load(str(tmp_path))


LABELS, IMAGES = "train-labels-idx1-ubyte", "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("path", "content", "text"),
    [
        ("t10k-images-idx3-ubyte", idx(TEST[0]), "t10k-images-.* has no file of labels"),
        ("t10k-labels.idx1-ubyte.gz", idx(TEST[1]), "t10k-labels.* has no file of images"),
        (LABELS, idx(TRAIN[1])[:-1], f"{LABELS}: cannot be read .*19 bytes"),
        (LABELS, idx(TEST[1]), rf"{LABELS} holds uint8 \(10,\); expected"),
    ],
    ids=["no labels", "no images", "cut", "of another set"],
)
def test_idx_files_that_make_no_sets_are_named(
    path: str, content: bytes, text: str, tmp_path: Path
) -> None:
    write_pair(tmp_path, "train", TRAIN)
    (tmp_path / path).write_bytes(content)
    with pytest.raises(DataError, match=text):
        Mnist().load(str(tmp_path))
    with pytest.raises(DataError, match=f"{IMAGES} is a file; expected a directory"):
        Mnist().load(str(tmp_path / IMAGES))
