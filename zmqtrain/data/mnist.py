"""MNIST, or any data set in its files, such as Fashion-MNIST."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.arrays import ArrayDataset, check_split, split
from zmqtrain.data.idx import read_idx
from zmqtrain.errors import DataError

ARCHIVE = "mnist.npz"
# NumPy raises these for a file that is not a complete npz of plain arrays.
ARCHIVE_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
IMAGE_SHAPE = (28, 28)
CLASSES = 10
TRAIN, TEST = "train", "t10k"


@dataclass(frozen=True, slots=True)
class Mnist:
    """Data: handwritten digits of 28 x 28 pixels, from the job's data directory.

    The directory holds either Keras's ``mnist.npz`` or the IDX files of MNIST, gzipped or not.
    Features are float32 (n, 784) in 0 .. 1, labels int64 (n,) in 0 .. 9.

    If there are training and test files, these are the two sets. If there is only one of them, the
    fraction ``holdout`` of its examples, chosen by ``seed``, is the evaluation set.
    """

    holdout: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        check_split(self.holdout, self.seed)

    def load(self, directory: str | None) -> tuple[ArrayDataset, ArrayDataset]:
        if directory is None:
            raise _missing("no data directory is set")
        folder = Path(directory)
        if not folder.is_dir():
            raise _missing(f"the data directory {directory} does not exist or is not a directory")
        try:
            if (folder / ARCHIVE).exists():
                return _read_archive(folder / ARCHIVE)
            pairs = [pair for name in (TRAIN, TEST) if (pair := _find_pair(folder, name))]
        except PermissionError as error:
            raise DataError(
                f"the data directory {directory} cannot be read ({error.strerror}); expected a "
                "directory that this user can read; correct its permissions, or --data"
            ) from error
        if not pairs:
            raise _missing(f"the data directory {directory} holds none of MNIST's files")
        sets = [_read_pair(*pair) for pair in pairs]
        if len(sets) == 2:
            return sets[0], sets[1]
        return split(sets[0].arrays, self.holdout, self.seed)


def _read_archive(path: Path) -> tuple[ArrayDataset, ArrayDataset]:
    """Read Keras's archive."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            train = archive["x_train"], archive["y_train"]
            test = archive["x_test"], archive["y_test"]
    except ARCHIVE_ERRORS as cause:
        raise DataError(
            f"{path}: cannot be read ({_reason(cause)}); expected an npz file with the arrays "
            "x_train, y_train, x_test and y_test; download it again"
        ) from cause
    return (
        _dataset(*train, f"{path}: x_train", f"{path}: y_train"),
        _dataset(*test, f"{path}: x_test", f"{path}: y_test"),
    )


def _reason(cause: Exception) -> str:
    """Return why NumPy could not read a file, without its advice to allow pickled data."""
    return "it is not an npz file" if "allow_pickle" in str(cause) else str(cause)


def _find_pair(folder: Path, name: str) -> tuple[Path, Path] | None:
    """Return the files of the ``name`` set's images and labels, None if both are absent."""
    images, labels = (
        next((folder / file for file in names if (folder / file).exists()), None)
        for names in (_image_names(name), _label_names(name))
    )
    if images and labels:
        return images, labels
    if images or labels:
        absent = _label_names(name) if images else _image_names(name)
        raise DataError(
            f"{images or labels} has no file of {'labels' if images else 'images'} beside it; "
            f"expected {' or '.join(absent)}; download that file, too, or remove this one"
        )
    return None


def _read_pair(images: Path, labels: Path) -> ArrayDataset:
    return _dataset(read_idx(images), read_idx(labels), str(images), str(labels))


def _dataset(
    images: NDArray[Any], labels: NDArray[Any], images_source: str, labels_source: str
) -> ArrayDataset:
    """Check both arrays and return them as examples; the sources are for error texts."""
    if images.dtype != np.uint8 or images.shape[1:] != IMAGE_SHAPE or len(images) == 0:
        raise DataError(
            f"{images_source} holds {images.dtype} {images.shape}; expected uint8 (n, 28, 28) "
            "with n >= 1; put MNIST's files into the data directory"
        )
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise DataError(
            f"{labels_source} holds {labels.dtype} {labels.shape}; expected integers "
            f"{images.shape[:1]}, one for each image; take images and labels of one set"
        )
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise DataError(
            f"{labels_source} holds labels from {labels.min()} to {labels.max()}; expected 0 to "
            f"{CLASSES - 1}; put MNIST's files into the data directory"
        )
    features = images.reshape(len(images), -1).astype(np.float32)
    features /= 255
    return ArrayDataset(features, labels.astype(np.int64))


def _missing(found: str) -> DataError:
    pairs = " and/or ".join(
        f"{_image_names(name)[0]} with {_label_names(name)[0]}" for name in (TRAIN, TEST)
    )
    return DataError(
        f"{found}; expected a directory with {ARCHIVE}, or {pairs} (each may end in .gz, and "
        "-idx may be .idx); give it with --data DIR or ZMQTRAIN_DATA"
    )


def _image_names(name: str) -> tuple[str, ...]:
    return _spellings(f"{name}-images", "idx3-ubyte")


def _label_names(name: str) -> tuple[str, ...]:
    return _spellings(f"{name}-labels", "idx1-ubyte")


def _spellings(stem: str, ending: str) -> tuple[str, ...]:
    return tuple(f"{stem}{mark}{ending}{gz}" for mark in "-." for gz in ("", ".gz"))
