"""Examples that are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqtrain.data import ArrayDataset, Cached
from zmqtrain.errors import ConfigError, DataError


class Counted(ArrayDataset):
    """Counts how often each example is read."""

    def __init__(self, *arrays: Any) -> None:
        super().__init__(*arrays)
        self.reads = np.zeros(len(self), int)

    def take(self, indices: Any) -> Any:
        np.add.at(self.reads, indices, 1)
        return super().take(indices)


def examples(rows: int = 9) -> Counted:
    return Counted(np.arange(rows * 2.0).reshape(rows, 2), np.arange(rows))


def test_memory_keeps_the_examples_that_were_read() -> None:
    source = examples()
    cached = Cached(source)
    for indices in ([4, 4, 1], [1, 8], [4, 8]):
        np.testing.assert_array_equal(cached.take(np.array(indices))[1], indices)
    np.testing.assert_array_equal(source.reads[[4, 1, 8, 0]], [1, 1, 1, 0])


def test_cache_larger_than_the_memory_is_refused() -> None:
    class Petabytes:
        def __len__(self) -> int:
            return 10**9

        def take(self, indices: Any) -> Any:
            return (np.zeros((len(indices), 10**6)),)

    with pytest.raises(ConfigError, match="give it a directory"):
        Cached(Petabytes()).take(np.array([0]))


def test_directory_is_written_once_and_read_by_later_tasks(tmp_path: Path) -> None:
    source, later = examples(2500), examples(2500)
    for dataset in (source, later):
        cached = Cached(dataset, tmp_path / "cache")
        np.testing.assert_array_equal(cached.take(np.array([2499, 0, 1024]))[1], [2499, 0, 1024])
    assert source.reads[5] == 1
    assert later.reads[5] == 0


@pytest.mark.parametrize("other", [[0, 1], [0, 7, 2]], ids=["fewer", "changed in the middle"])
def test_directory_of_other_data_is_refused(tmp_path: Path, other: list[int]) -> None:
    Cached((np.arange(3),), tmp_path).take(np.array([1]))
    with pytest.raises(DataError, match="remove that directory"):
        Cached((np.array(other),), tmp_path).take(np.array([1]))


def test_half_written_directory_is_written_again(tmp_path: Path) -> None:
    Cached(examples(), tmp_path).take(np.array([0]))
    (tmp_path / "cache.json").unlink()
    (tmp_path / "0.npy").write_bytes(b"half")
    np.testing.assert_array_equal(Cached(examples(), tmp_path).take(np.array([8]))[1], [8])


def test_directory_that_cannot_be_written_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be made"):
        Cached(examples(), tmp_path / "file" / "cache").take(np.array([0]))
