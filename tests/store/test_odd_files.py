"""Files that are not what they must be: each reader names the file, and waits for nobody."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqtrain.config import run_file
from zmqtrain.data import Cached
from zmqtrain.errors import CheckpointError, ConfigError, DataError, SegmentError
from zmqtrain.files import read_file
from zmqtrain.store import weights
from zmqtrain.store.checkpoint import read_parameters
from zmqtrain.store.logdir import claimed, is_claim_seen, last_generation, newest_group
from zmqtrain.store.manifest import read_manifest, verify
from zmqtrain.store.segment import reach
from zmqtrain.store.segment_layout import SegmentLayout
from zmqtrain.transport.keys import Owner, Pair, add_keys, key_files, read_registry, read_secret

SPARSE_NBYTES = 1 << 42


def sparse(path: Path) -> None:
    path.touch(0o600)
    os.truncate(path, SPARSE_NBYTES)


ODD: dict[str, Callable[[Path], object]] = {
    "a FIFO": lambda path: os.mkfifo(path, 0o600),
    "a directory": lambda path: path.mkdir(0o700),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "4.4 TB": sparse,
    "No such file": lambda path: path.symlink_to("nowhere"),
}
"""What is put in a file's place, by what is said of it."""

READERS: dict[str, tuple[type[Exception], Callable[[Path], object]]] = {
    "EPOCH": (CheckpointError, lambda path: last_generation(path.parent)),
    "checkpoints/GROUP-3": (CheckpointError, lambda path: newest_group(str(path.parent.parent))),
    "manifest.json": (CheckpointError, lambda path: read_manifest(path.parent)),
    "a.npz": (ConfigError, weights.read),
    "a.safetensors": (ConfigError, weights.read),
    "registry": (ConfigError, lambda path: read_registry(path.parent)),
    "ps-0.secret": (ConfigError, lambda path: read_secret(path.parent, Owner("ps"))),
    "worker-1.secret": (ConfigError, lambda path: key_files(path.parent)),
    "any": (OSError, read_file),
}

OTHERWISE = {
    ("a.npz", "4.4 TB"): "not a zip file",
    ("registry", "a device"): "open to others",
    ("ps-0.secret", "a device"): "open to others",
}
"""What is said of those that are refused before they are opened."""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Interrupt a test that blocks in a system call."""

    def fail(*_: object) -> None:
        raise AssertionError("it waits for another process to open the file")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", READERS)
def test_odd_file_is_an_error_that_names_it(tmp_path: Path, name: str, kind: str) -> None:
    error, read = READERS[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    tmp_path.chmod(0o700)
    if name == "worker-1.secret":
        add_keys(tmp_path, {Owner("ps"): Pair("a" * 64, "b" * 64)})
    ODD[kind](path)
    if (name, kind) in {("EPOCH", "No such file"), ("checkpoints/GROUP-3", "No such file")}:
        assert not any(read(path) or [0]) if "GROUP" in name else read(path) == 0
        return
    with pytest.raises(error) as raised:
        read(path)
    text = str(raised.value)
    assert str(path) in text
    assert OTHERWISE.get((name, kind), kind) in text


@pytest.mark.parametrize("kind", ODD)
def test_odd_shard_of_a_checkpoint_is_a_checkpoint_error(
    job: Any, tmp_path: Path, kind: str
) -> None:
    path = job.save(tmp_path)
    manifest = read_manifest(path)
    file = path / manifest.files[0].file
    file.unlink()
    ODD[kind](file)
    for read in (verify, read_parameters):
        with pytest.raises(CheckpointError, match=str(file)):
            read(path, manifest)


@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a device"])
def test_odd_lock_is_an_error_instead_of_no_lock(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    ODD[kind](root / "LOCK")
    with pytest.raises(CheckpointError, match=f"LOCK: it is {kind}"), claimed(str(tmp_path)):
        pass
    with pytest.raises(CheckpointError, match=f"LOCK: it is {kind}"):
        is_claim_seen(str(root / "step-00000000.tmp-00000000"))


@pytest.mark.parametrize("kind", ODD)
def test_odd_segment_is_not_mapped(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ps-0-0123456789abcdef.segment"
    ODD[kind](path)
    with pytest.raises(SegmentError, match=str(path)):
        reach(str(path), SegmentLayout(8, []))


@pytest.mark.parametrize("kind", ODD)
def test_odd_note_of_an_end_is_no_end(tempdir: Path, kind: str) -> None:
    run_file.note_end(("a:1",), 0)
    (note,) = tempdir.rglob("*.ended")
    note.unlink()
    ODD[kind](note)
    assert run_file.end_since(("a:1",), 0.0) is None
    ODD[kind](note.with_name(f"{os.getpid()}.json"))
    assert run_file.running_jobs() == []


@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a device", "4.4 TB"])
def test_odd_note_of_a_cache_is_an_error(tmp_path: Path, kind: str) -> None:
    data = (np.zeros((4, 2), np.float32), np.zeros(4, np.int64))
    Cached(data, directory=tmp_path).take(np.arange(1))
    (note,) = tmp_path.glob("*.json")
    note.unlink()
    ODD[kind](note)
    with pytest.raises(DataError, match=kind):
        Cached(data, directory=tmp_path).take(np.arange(1))


def test_file_of_the_largest_size_is_read_and_one_beyond_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5)
    assert read_file(tmp_path / "a", 5) == b"x" * 5
    with pytest.raises(OSError, match="5 B, expected at most 4 B"):
        read_file(tmp_path / "a", 4)
