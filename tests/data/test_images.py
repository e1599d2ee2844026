"""Images in folders."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

from zmqtrain.data import Arrays, Cached, ImageFolder  # noqa: E402
from zmqtrain.errors import ConfigError, DataError  # noqa: E402

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
    images, labels = dataset.take(rows)
    assert (images.dtype, images.shape) == (np.float32, (4, 3, 4, 4))
    np.testing.assert_allclose(images[:, 0, 0, 0], np.array(ORDER)[rows] / 255, rtol=1e-6)
    np.testing.assert_array_equal(images[:, 2], 1)
    np.testing.assert_array_equal(labels, np.array(CLASSES)[rows])


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"size": (2, 3)}, (3, 2, 3)),
        ({"size": (2, 3), "channels": "last"}, (2, 3, 3)),
        ({"size": 2, "mode": "L"}, (1, 2, 2)),
    ],
)
def test_images_have_the_given_size_and_channels(options: Any, shape: Any, folder: Path) -> None:
    assert ImageFolder(folder, **options).take(np.array([0]))[0].shape == (1, *shape)


@pytest.mark.parametrize("name", ["size", "channels", "mode"])
def test_option_with_a_wrong_value_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"ImageFolder got {name}="):
        ImageFolder(folder, **{"size": 4} | {name: {"size": (4, 0)}.get(name, "RGBA")})  # type: ignore[arg-type]


def test_hidden_folders_and_files_are_no_examples(folder: Path) -> None:
    for name in (".ipynb_checkpoints/x.png", "cat/.x.png", "cat/.trash/x.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    dataset = ImageFolder(folder, size=4)
    assert (dataset.classes, len(dataset)) == (["ant", "cat", "dog"], 4)
    assert [path.name for path in dataset.source_files] == ["x.bmp", "a.png", "b.png", "z.PNG"]


def test_evaluation_images_of_other_classes_are_refused(
    folder: Path, tmp_path_factory: Any
) -> None:
    train, held = ImageFolder(folder, size=4), tmp_path_factory.mktemp("held")
    (held / "cat").mkdir()
    (folder / "cat" / "a.png").rename(held / "cat" / "a.png")
    with pytest.raises(DataError, match=r"classes \['cat'\], .* \['ant', 'cat', 'dog'\]"):
        Arrays(Cached(train), ImageFolder(held, size=4)).load(None)
    for name in ("ant", "dog"):
        (held / name).mkdir()
    _, evaluation = Arrays(train, ImageFolder(held, size=4)).load(None)
    assert evaluation is not None and evaluation.take(np.array([0]))[1].tolist() == [1]


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


RANDOM = np.random.default_rng(0)
GRAY16 = RANDOM.integers(0, 2**16, (6, 5)).astype(np.uint16)
BYTES = RANDOM.integers(0, 256, (6, 5, 4)).astype(np.uint8)
FLOATS = RANDOM.random((6, 5)).astype(np.float32)


def put(folder: Path, name: str, image: Any, **options: Any) -> ImageFolder:
    (folder / "class").mkdir(exist_ok=True)
    image.save(folder / "class" / name, **options)
    return ImageFolder(folder, (6, 5), "last")


def pixels(dataset: ImageFolder, index: int = 0) -> Any:
    return dataset.take(np.array([index]))[0][0]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("a.png", GRAY16),
        ("a.tif", GRAY16),
        ("a.tif", GRAY16.astype(">u2")),
        ("a.pgm", GRAY16),
        ("a.tif", FLOATS),
    ],
)
def test_gray_values_of_more_than_8_bits_keep_all_of_them(
    name: str, array: Any, mode: Any, tmp_path: Path
) -> None:
    dataset = replace(put(tmp_path, name, Image.fromarray(array)), mode=mode)
    expected = array / (1 if array.dtype == np.float32 else 65535)
    found = pixels(dataset)
    assert found.shape == (6, 5, len(mode))
    np.testing.assert_allclose(found, np.repeat(expected[..., None], len(mode), 2), atol=1e-6)


@pytest.mark.parametrize(("size", "atol"), [((6, 5), 1e-6), (3, 1 / 255)])
def test_images_of_8_and_16_bits_have_one_scale(size: Any, atol: float, tmp_path: Path) -> None:
    put(tmp_path, "a.png", Image.fromarray(BYTES[..., 0]))
    put(tmp_path, "b.png", Image.fromarray(BYTES[..., 0].astype(np.uint16) * 257))
    dataset = ImageFolder(tmp_path, size, mode="L")
    np.testing.assert_allclose(pixels(dataset, 0), pixels(dataset, 1), atol=atol)


MODES = ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("source", [*MODES, "LAB", "I", "I;16", "I;16B", "F"])
def test_every_mode_is_as_pillow_converts_it_or_refused_by_name(
    source: str, mode: Any, tmp_path: Path
) -> None:
    image = Image.fromarray(BYTES[..., :3])
    image = Image.new(source, (5, 6)) if source == "LAB" else converted(image, source)
    dataset = replace(put(tmp_path, "a.tif", image), mode=mode)
    with Image.open(tmp_path / "class" / "a.tif") as stored:
        found_mode, gray = stored.mode, np.asarray(stored)
        is_wide = found_mode[0] in "IF"
        try:
            expected = np.asarray(stored.convert(mode)).reshape(6, 5, -1) / 255
        except ValueError:
            expected = None
    if found_mode == "I" or expected is None or (found_mode == "F" and gray.max() > 1):
        with pytest.raises(DataError, match=rf"a\.tif is of Pillow's mode '{found_mode}'"):
            pixels(dataset)
    else:
        if is_wide:
            expected = np.repeat(gray[..., None] / 65535, len(mode), 2)
        np.testing.assert_allclose(pixels(dataset), expected, atol=1e-6)


def converted(image: Any, mode: str) -> Any:
    """Return an image in a mode, by way of one that Pillow has a conversion from."""
    try:
        return image.convert(mode)
    except ValueError:
        return image.convert("L").convert(mode)


@pytest.mark.parametrize("value", [-0.5, 1.5, np.nan])
def test_floats_beyond_one_are_refused_with_the_values(value: float, tmp_path: Path) -> None:
    array = FLOATS.copy()
    array[2, 3] = value
    dataset = put(tmp_path, "a.tif", Image.fromarray(array))
    with pytest.raises(DataError, match=r"a\.tif is of Pillow's mode 'F'; .* values from .* to "):
        pixels(dataset)


def tiff(path: Path, bits: int, photometric: int) -> ImageFolder:
    """Write an image of two pixels; of 12 bits they are 4095 and 2048."""
    entries = [(256, 4, 2), (257, 4, 1), (258, 3, bits), (259, 3, 1), (262, 3, photometric),
               (273, 4, 8), (277, 3, 1), (278, 4, 1), (279, 4, bits // 4)]  # fmt: skip
    (path / "class").mkdir()
    (path / "class" / "a.tif").write_bytes(
        b"II*\0\x0c\0\0\0"
        + bytes([0xFF, 0xF8, 0x00, 0x00])
        + struct.pack("<H", len(entries))
        + b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
        + bytes(4)
    )
    return ImageFolder(path, (1, 2), "last", "L")


def test_image_of_12_bits_is_divided_by_its_own_range(tmp_path: Path) -> None:
    found = pixels(tiff(tmp_path, 12, photometric=1))
    np.testing.assert_allclose(found[0, :, 0], [1, 2048 / 4095], atol=1e-6)


def test_image_in_which_white_is_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mode 'I;16'; expected gray values of which 0 is black"):
        pixels(tiff(tmp_path, 16, photometric=0))
