"""A process that dies, or a disk that fails, at any step of saving."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from zmqtrain.errors import CheckpointError
from zmqtrain.store.checkpoint import commit, read_parameters
from zmqtrain.store.logdir import checkpoints, newest_valid, prune
from zmqtrain.store.manifest import Manifest, read_manifest

DURABLE_STEPS = ("fsync", "rename", "replace", "unlink", "rmdir")


class Died(BaseException):
    """The process is gone: no handler of the code under test may see this."""


@contextmanager
def _failing_at(number: int, failure: BaseException, done: bool) -> Iterator[list[str]]:
    """Raise at the ``number``-th durable step, before or after it is done; yield those begun."""
    begun: list[str] = []

    def failing(name: str, real: Callable) -> Callable:
        def step(*args: object, **kwargs: object) -> object:
            begun.append(name)
            fails = len(begun) == number
            if fails and not done:
                raise failure
            result = real(*args, **kwargs)
            if fails:
                raise failure
            return result

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in DURABLE_STEPS:
            patch.setattr(os, name, failing(name, getattr(os, name)))
        yield begun


def _valid(logdir: Path) -> tuple[Path, Manifest] | None:
    def on_damaged(path: Path, error: CheckpointError) -> None:
        raise AssertionError(f"{path} was published damaged") from error

    return newest_valid(logdir, on_damaged)


def _fail_everywhere(
    job, tmp_path: Path, failure: BaseException, done: bool, earlier: int | None
) -> list[tuple[Path, int | None]]:
    """Save step 20, failing at step 1, 2, ... of it; return (logdir, generation then found)."""
    outcomes = []
    for number in count(1):
        logdir = tmp_path / str(number)
        if earlier is not None:
            job.save(logdir, earlier, generation=1)
        with _failing_at(number, failure, done) as begun:
            try:
                job.save(logdir, 20, generation=2)
            except (Died, CheckpointError) as error:
                assert isinstance(error, Died) == isinstance(failure, Died)
            else:
                assert len(begun) < number
                return outcomes
        found = _valid(logdir)
        outcomes.append((logdir, found and found[1].generation))
    raise AssertionError("unreachable")


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("failure", [Died(), OSError(errno.EIO, "Input/output error")], ids=repr)
@pytest.mark.parametrize("earlier", [None, 10, 20], ids=["first", "other step", "same step"])
def test_failure_at_any_step_of_a_save_leaves_the_earlier_or_the_new_checkpoint(
    job, tmp_path: Path, failure: BaseException, done: bool, earlier: int | None
) -> None:
    outcomes = _fail_everywhere(job, tmp_path, failure, done, earlier)
    generations = [generation for _, generation in outcomes]
    before = None if earlier is None else 1
    assert len(generations) >= 5
    assert set(generations) == {before, 2}
    assert generations == sorted(generations, key=lambda generation: generation == 2), (
        "never back to the earlier one"
    )


@pytest.mark.parametrize("earlier", [None, 10, 20], ids=["first", "other step", "same step"])
def test_next_life_saves_and_cleans_up_whatever_the_last_one_left(
    job, tmp_path: Path, earlier: int | None
) -> None:
    for logdir, _ in _fail_everywhere(job, tmp_path, Died(), True, earlier):
        path = job.save(logdir, 20, generation=3)
        prune(logdir, keep=1)
        assert checkpoints(logdir) == [path]
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["LATEST", path.name]
        found = _valid(logdir)
        assert found is not None
        assert found[1].generation == 3


def _extent(file: int | Path) -> object:
    """Return the size of a file, or the entries of a directory; unflushed, either can be lost."""
    status = os.stat(file)
    return sorted(os.listdir(file)) if stat.S_ISDIR(status.st_mode) else status.st_size


@pytest.mark.parametrize("earlier", [10, 20])
def test_everything_is_flushed_before_it_is_published_and_nothing_deleted_before(
    job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int
) -> None:
    root = job.save(tmp_path, earlier).parent
    events: list[str] = []
    flushed: dict[int, object] = {}
    fsync, rename, unlink = os.fsync, os.rename, os.unlink

    def on_fsync(descriptor: int) -> None:
        fsync(descriptor)
        inode = os.fstat(descriptor).st_ino
        flushed[inode] = _extent(descriptor)
        if inode == root.stat().st_ino:
            events.append("root flushed")

    def on_rename(source: Path, target: Path) -> None:
        if target == root / "step-00000020":
            parts = [source, *source.iterdir()]
            assert all(flushed[part.stat().st_ino] == _extent(part) for part in parts)
            assert len(parts) == 4
            events.append("published")
        rename(source, target)

    def on_unlink(*args: object, **kwargs: object) -> None:
        events.append("deleted")
        unlink(*args, **kwargs)

    for name, call in {"fsync": on_fsync, "rename": on_rename, "unlink": on_unlink}.items():
        monkeypatch.setattr(os, name, call)
    job.save(tmp_path, 20)
    assert events[:2] == ["published", "root flushed"]
    assert ("deleted" in events) == (earlier == 20)


def test_checkpoint_of_the_same_step_is_replaced(job, tmp_path: Path) -> None:
    job.save(tmp_path, 20, layouts=job.layouts(5), generation=1)
    path = job.save(tmp_path, 20, layouts=job.layouts(2), generation=2)
    assert checkpoints(tmp_path) == [path]
    assert len(list(path.iterdir())) == 3
    assert read_manifest(path).generation == 2
    assert read_parameters(path, read_manifest(path)).keys() == job.state["parameters"].keys()


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: os.truncate(file, 100)])
def test_attempt_whose_files_are_not_as_reported_is_not_published(
    job, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    temporary, manifest = job.write(tmp_path, 20)
    damage(temporary / "shard-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"shard-00001\.safetensors: "):
        commit(temporary, manifest)
    assert checkpoints(tmp_path) == []
