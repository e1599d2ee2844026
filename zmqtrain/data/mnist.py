"""MNIST, or any data set in its files, such as Fashion-MNIST, and a reader of the format IDX."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.arrays import ArrayDataset, check_split, split
from zmqtrain.data.files import reading
from zmqtrain.errors import DataError
from zmqtrain.models.base import Array

DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"
ARCHIVE = "mnist.npz"
IMAGE_SHAPE = (28, 28)
CLASSES = 10
EXPECTED = (
    "expected a directory with mnist.npz, or train-images-idx3-ubyte with train-labels-idx1-ubyte "
    "and/or t10k-images-idx3-ubyte with t10k-labels-idx1-ubyte (each may end in .gz, and -idx may "
    "be .idx); give it with --data DIR or ZMQTRAIN_DATA"
)


@dataclass(frozen=True, slots=True)
class Mnist:
    """Data: handwritten digits of 28 x 28 pixels, from the job's data directory.

    The directory holds either Keras's ``mnist.npz`` or the IDX files of MNIST, gzipped or not; that
    archive may also be named itself.
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
            raise DataError(f"no data directory is set; {EXPECTED}")
        folder = Path(directory)
        if folder.suffix == ".npz" and folder.is_file():
            return _of_archive(folder)
        if folder.is_file():
            raise DataError(f"{directory} is a file; {EXPECTED}")
        with reading(folder):
            files = sorted(folder.iterdir())
        if folder / ARCHIVE in files:
            return _of_archive(folder / ARCHIVE)
        sets = [part for name in ("train", "t10k") if (part := _of_idx(files, name)) is not None]
        if not sets:
            raise DataError(f"{directory} holds none of MNIST's files; {EXPECTED}")
        if len(sets) == 1:
            return split(sets[0].arrays, self.holdout, self.seed)
        return sets[0], sets[1]


def _of_archive(path: Path) -> tuple[ArrayDataset, ArrayDataset]:
    """Read Keras's archive."""
    with reading(path), path.open("rb") as file, np.load(file) as archive:
        train = archive["x_train"], archive["y_train"]
        test = archive["x_test"], archive["y_test"]
    return (
        _dataset(*train, f"{path}: x_train", f"{path}: y_train"),
        _dataset(*test, f"{path}: x_test", f"{path}: y_test"),
    )


def _of_idx(files: list[Path], name: str) -> ArrayDataset | None:
    """Read the set of this name, None if it has no file."""
    images, labels = (_find(files, f"{name}-{kind}") for kind in ("images", "labels"))
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        raise DataError(
            f"{images or labels} has no file of {'labels' if images else 'images'} beside it; "
            "expected both; download that file, too, or remove this one"
        )
    return _dataset(read_idx(images), read_idx(labels), str(images), str(labels))


def _find(files: list[Path], stem: str) -> Path | None:
    pattern = f"{stem}[-.]idx?-ubyte"
    return next((f for f in files if fnmatch(f.name.removesuffix(".gz"), pattern)), None)


def _dataset(images: Array, labels: Array, images_source: str, labels_source: str) -> ArrayDataset:
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


def read_idx(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Return the array in the IDX file at ``path``, in native byte order.

    The format is that of MNIST (http://yann.lecun.com/exdb/mnist/): two zero bytes, a type code,
    the number of dimensions (one byte), each dimension as a big-endian uint32, then the items in C
    order, big-endian. A file may be gzipped.

    Raises:
        DataError: the file cannot be read or is not one whole IDX file.
    """
    with reading(path):
        content = Path(path).read_bytes()
        if content[:2] == GZIP_MAGIC:
            content = gzip.decompress(content)
        code, dimensions = content[2], content[3]
        if content[:2] != b"\0\0" or code not in DTYPES or not dimensions:
            raise ValueError(f"it begins with {content[:4].hex(' ')}, as no IDX file does")
        dtype = np.dtype(DTYPES[code])
        shape = np.frombuffer(content, ">u4", dimensions, offset=4).tolist()
        found = len(content) - 4 - 4 * dimensions
        if found != prod(shape) * dtype.itemsize:
            raise ValueError(f"{found} bytes of items for the shape {shape} of {dtype}")
        items = np.frombuffer(content, dtype, offset=len(content) - found)
        return items.reshape(shape).astype(dtype.newbyteorder("="))
