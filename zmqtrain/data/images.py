"""Images in folders, one folder for each class."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.files import reading
from zmqtrain.errors import DataError, imported
from zmqtrain.models.base import Array, Batch

ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Examples: images as float32 in 0 .. 1, and the number of their class as int64.

    ``directory`` has a folder for each class, with images in it or below it. ``size`` is (height,
    width), or one number for both; images are stretched to it. ``channels``: "first" for arrays
    (n, channels, height, width), as torch has them, or "last". ``mode``: "RGB", or "L" for gray.
    ``threads`` decode the images of a batch.
    """

    directory: str | Path
    size: int | tuple[int, int]
    channels: Literal["first", "last"] = "first"
    mode: Literal["RGB", "L"] = "RGB"
    threads: int = 2

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes, which are those of the folders, in order.

        Raises:
            DataError: there is no folder.
        """
        with reading(self.directory):
            names = sorted(path.name for path in Path(self.directory).iterdir() if path.is_dir())
        if not names:
            raise DataError(
                f"{self.directory} has no folders; expected one for each class, with its images"
            )
        return names

    def __len__(self) -> int:
        return len(self._images)

    def take(self, indices: Array) -> Batch:
        """Return these images and their classes.

        Raises:
            ConfigError: Pillow is not installed.
            DataError: an image cannot be read; the text names it.
        """
        chosen = [self._images[index] for index in np.asarray(indices).tolist()]
        with ThreadPoolExecutor(self.threads) as threads:
            images = np.stack(list(threads.map(self._pixels, [path for path, _ in chosen])))
        return images, np.array([number for _, number in chosen], np.int64)

    @cached_property
    def _images(self) -> list[tuple[Path, int]]:
        """File and class of each image, by class and name."""
        return [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((Path(self.directory) / name).rglob("*"))
            if path.suffix.lower() in ENDINGS
        ]

    def _pixels(self, path: Path) -> NDArray[np.float32]:
        library = imported("PIL.Image", "data")
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        with reading(path), library.open(path) as image:
            resized = image.convert(self.mode).resize((width, height), library.Resampling.BILINEAR)
        pixels = np.asarray(resized, np.float32).reshape(height, width, -1)
        pixels = pixels / np.float32(255)
        return pixels.transpose(2, 0, 1) if self.channels == "first" else pixels
