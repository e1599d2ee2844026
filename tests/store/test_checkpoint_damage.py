"""Bits that rot: every damage is noticed, and an older checkpoint takes over, loudly."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from zmqtrain.errors import CheckpointError
from zmqtrain.store.checkpoint import read_parameters, read_shard
from zmqtrain.store.logdir import newest_valid
from zmqtrain.store.manifest import read_manifest, verify

FILES = ("manifest.json", "shard-00000.safetensors", "shard-00001.safetensors")


def _flip(file: Path, position: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def _assert_damaged(path: Path, file: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: ")):
        verify(path, read_manifest(path))


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_noticed(job, tmp_path: Path, name: str) -> None:
    path = job.save(tmp_path)
    file = path / name
    content = file.read_bytes()
    for position in range(0, len(content), 1 + len(content) // 400):
        _flip(file, position, bit=position % 8)
        _assert_damaged(path, file)
        file.write_bytes(content)
    verify(path, read_manifest(path))


def _append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "emptied": lambda file: os.truncate(file, 0),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "longer": _append,
    "flipped": lambda file: _flip(file, file.stat().st_size // 2, bit=3),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damaged_newest_checkpoint_falls_back_to_the_one_before_loudly(
    job, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    oldest, older, newest = (job.save(tmp_path, step) for step in (10, 20, 30))
    damage(newest / name)
    skipped: list[tuple[Path, CheckpointError]] = []
    found = newest_valid(tmp_path, lambda *damaged: skipped.append(damaged))
    assert found == (older, read_manifest(older))
    assert [path for path, _ in skipped] == [newest]
    assert str(newest / name) in str(skipped[0][1])
    shutil.rmtree(older)
    found = newest_valid(tmp_path, lambda *damaged: None)
    assert found == (oldest, read_manifest(oldest))


def test_training_does_not_start_afresh_when_every_checkpoint_is_damaged(
    job, tmp_path: Path
) -> None:
    for step in (10, 20):
        _flip(job.save(tmp_path, step) / FILES[1], 500, bit=0)
    skipped: list[Path] = []
    with pytest.raises(CheckpointError) as refused:
        newest_valid(tmp_path, lambda path, error: skipped.append(path))
    assert [path.name for path in skipped] == ["step-00000020", "step-00000010"]
    assert str(refused.value) == (
        f"{tmp_path}/checkpoints: none of its 2 checkpoints is valid; expected at least one; "
        "bring one back, or train in a new logdir"
    )


def test_shard_file_of_another_layout_is_refused_even_unverified(job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 10, layouts=job.layouts(2))
    other = job.save(tmp_path, 20, layouts=job.layouts(3))
    for name in FILES[1:]:
        shutil.copy(other / name, path / name)
    with pytest.raises(CheckpointError, match=r"tensor '.*' is float32 of shape"):
        read_parameters(path, read_manifest(path))


@pytest.mark.parametrize("length", [0, 4, 100, 600])
def test_cut_shard_file_is_refused_even_unverified(job, tmp_path: Path, length: int) -> None:
    path = job.save(tmp_path, layouts=job.layouts(1))
    os.truncate(path / FILES[1], length)
    with pytest.raises(CheckpointError, match=re.escape(f"{path / FILES[1]}: cannot be read")):
        read_shard(path, read_manifest(path), job.layouts(1)[0], job.initial)
