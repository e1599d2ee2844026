"""Images in folders, one folder for each class."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.files import reading
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.hints import imported
from zmqtrain.models.base import Array, Batch

ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
BITS_PER_SAMPLE, WHITE_IS_ZERO = 258, 262  # TIFF's tags


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Examples: images as float32 in 0 .. 1, and the number of their class as int64.

    ``directory`` has a folder for each class, with images in it or below it. ``size`` is (height,
    width), or one number for both; images are stretched to it. ``channels``: "first" for arrays
    (n, channels, height, width), as torch has them, or "last", as Keras has. ``mode``: "RGB", or
    "L" for gray. ``threads`` decode the images of a batch.

    Images with 8 or 16 bits a channel are divided by their own range, so folders may mix them;
    images of floats must be in 0 .. 1. Others, such as those of 32-bit integers, are refused.
    Alpha is dropped, and EXIF's orientation is ignored. Hidden files and folders are left out.
    """

    directory: str | Path
    size: int | tuple[int, int]
    channels: Literal["first", "last"] = "first"
    mode: Literal["RGB", "L"] = "RGB"
    threads: int = 2

    def __post_init__(self) -> None:
        sides = (self.size, self.size) if isinstance(self.size, int) else self.size
        checks = {
            "size": len(sides) == 2 and all(isinstance(n, int) and n > 0 for n in sides),
            "channels": self.channels in ("first", "last"),
            "mode": self.mode in ("RGB", "L"),
        }
        if wrong := [name for name, is_right in checks.items() if not is_right]:
            raise ConfigError(
                f"ImageFolder got {wrong[0]}={getattr(self, wrong[0])!r}; expected a size such as "
                "224 or (224, 160), channels 'first' or 'last', and mode 'RGB' or 'L'"
            )

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes, which are those of the folders, in order.

        Raises:
            DataError: there is no folder.
        """
        with reading(self.directory):
            paths = [path for path in Path(self.directory).iterdir() if path.is_dir()]
            names = sorted(path.name for path in paths if not path.name.startswith("."))
        if not names:
            raise DataError(
                f"{self.directory} has no folders; expected one for each class, with its images"
            )
        return names

    def __len__(self) -> int:
        return len(self._images)

    def take(self, indices: Array) -> Batch:
        chosen = [self._images[index] for index in np.asarray(indices).tolist()]
        with ThreadPoolExecutor(self.threads) as threads:
            images = np.stack(list(threads.map(self._pixels, [path for path, _ in chosen])))
        return images, np.array([number for _, number in chosen], np.int64)

    @property
    def source_files(self) -> list[Path]:
        """The images, by class and name."""
        return [path for path, _ in self._images]

    @cached_property
    def _images(self) -> list[tuple[Path, int]]:
        """File and class of each image, by class and name."""
        return [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((Path(self.directory) / name).rglob("*"))
            if path.suffix.lower() in ENDINGS
            and not any(part.startswith(".") for part in path.relative_to(self.directory).parts)
        ]

    def _pixels(self, path: Path) -> NDArray[np.float32]:
        library = imported("PIL.Image", "data")
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        with reading(path), library.open(path) as image:
            image.load()
            has_bytes = image.mode[0] not in "IF"
            converted = _in_bytes(image, self.mode, path) if has_bytes else _in_floats(image, path)
            resized = converted.resize((width, height), library.Resampling.BILINEAR)
        pixels: NDArray[np.float32] = np.array(resized, np.float32).reshape(height, width, -1)
        if resized.mode == "F":
            pixels = np.repeat(pixels, len(self.mode), axis=2)
        else:
            pixels /= 255
        return pixels.transpose(2, 0, 1) if self.channels == "first" else pixels


def _in_bytes(image: Any, mode: str, path: Path) -> Any:
    """Convert an image of at most 8 bits a channel to this mode."""
    try:
        return image.convert(mode)
    except ValueError as error:
        raise _refused(image, path, f"an image that Pillow converts to {mode}") from error


def _in_floats(image: Any, path: Path) -> Any:
    """Return a gray image of more than 8 bits in mode F, its range being 0 .. 1."""
    pixels, tags = np.asarray(image), getattr(image, "tag_v2", {})
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        if tags.get(WHITE_IS_ZERO) == 0:
            raise _refused(image, path, "gray values of which 0 is black")
        (bits,) = tags.get(BITS_PER_SAMPLE, (16,))
        pixels = pixels / ((1 << bits) - 1)
    elif image.mode == "I" or not (pixels.min() >= 0 and pixels.max() <= 1):
        found = f"; it has values from {pixels.min()} to {pixels.max()}"
        raise _refused(image, path, f"8 or 16 bits a channel, or floats in 0 .. 1{found}")
    return imported("PIL.Image", "data").fromarray(pixels.astype(np.float32))


def _refused(image: Any, path: Path, expected: str) -> DataError:
    return DataError(
        f"{path} is of Pillow's mode {image.mode!r}; expected {expected}; convert it, or leave it "
        "out"
    )
