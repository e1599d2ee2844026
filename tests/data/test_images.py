"""Images in folders."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

from zmqtrain.data import ImageFolder, Parallel  # noqa: E402
from zmqtrain.data.description import describe  # noqa: E402
from zmqtrain.errors import DataError  # noqa: E402

GRAYS = {"cat/b.png": 50, "cat/a.png": 100, "ant/deep/x.bmp": 200, "dog/z.PNG": 0}
ORDER = [200, 100, 50, 0]
CLASSES = [0, 1, 1, 2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, gray in GRAYS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (7, 5), (gray, gray, 255)).save(tmp_path / name)
    (tmp_path / "cat" / "notes.txt").touch()
    return tmp_path


def test_folders_are_classes_and_images_come_by_number(folder: Path) -> None:
    dataset = ImageFolder(folder, size=4)
    assert dataset.classes == ["ant", "cat", "dog"]
    assert len(dataset) == 4
    rows = np.array([3, 0, 1, 3])
    for source in (dataset, copy.deepcopy(dataset), Parallel(dataset, 2)):
        images, labels = source.take(rows)
        assert (images.dtype, images.shape) == (np.float32, (4, 3, 4, 4))
        np.testing.assert_allclose(images[:, 0, 0, 0], np.array(ORDER)[rows] / 255, rtol=1e-6)
        np.testing.assert_array_equal(images[:, 2], 1)
        np.testing.assert_array_equal(labels, np.array(CLASSES)[rows])
    assert describe(dataset) == describe(ImageFolder(folder, size=4))


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"size": (2, 3)}, (3, 2, 3)),
        ({"size": (2, 3), "channels": "last"}, (2, 3, 3)),
        ({"size": 2, "mode": "L"}, (1, 2, 2)),
    ],
)
def test_shape_is_the_one_asked_for(options: Any, shape: Any, folder: Path) -> None:
    assert ImageFolder(folder, **options).take(np.array([0]))[0].shape == (1, *shape)


@pytest.mark.parametrize("damage", ["cut", "removed", "text"])
def test_image_that_cannot_be_read_is_named(damage: str, folder: Path) -> None:
    dataset, path = ImageFolder(folder, 4), folder / "cat" / "a.png"
    assert len(dataset) == 4
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(b"text" if damage == "text" else path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"cat/a\.png: cannot be read"):
        dataset.take(np.array([0, 1]))


@pytest.mark.parametrize("name", ["absent", "cat"])
def test_directory_without_folders_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(DataError, match=str(folder / name)):
        len(ImageFolder(folder / name, 4))
