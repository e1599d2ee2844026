from __future__ import annotations

import os
from pathlib import Path

import pytest

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.store.checkpoint import begin
from zmqtrain.store.logdir import checkpoints, newest_valid, prune


def _names(logdir: Path) -> list[str]:
    return [path.name for path in checkpoints(logdir)]


def _never(path: Path, error: CheckpointError) -> None:
    raise AssertionError(f"{path} is sound") from error


def test_job_without_checkpoints_has_none_to_resume_from(job, tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "nowhere") == []
    assert newest_valid(tmp_path / "nowhere", _never) is None
    job.write(tmp_path, 10)
    assert checkpoints(tmp_path) == []
    assert newest_valid(tmp_path, _never) is None


def test_checkpoints_are_listed_newest_first_and_nothing_else(job, tmp_path: Path) -> None:
    for step in (30, 123456789, 4):
        job.save(tmp_path, step)
    begin(tmp_path, 50)
    (tmp_path / "checkpoints" / "notes.txt").touch()
    (tmp_path / "checkpoints" / "step-00000030.bak").mkdir()
    assert _names(tmp_path) == ["step-123456789", "step-00000030", "step-00000004"]


def test_checkpoint_of_a_later_generation_is_newer_than_one_of_a_higher_step(
    job, tmp_path: Path
) -> None:
    for step, generation in ((10, 1), (20, 1), (15, 2)):
        job.save(tmp_path, step, generation=generation)
    assert _names(tmp_path) == ["step-00000015", "step-00000020", "step-00000010"]
    found = newest_valid(tmp_path, _never)
    assert found is not None
    assert found[0].name == "step-00000015"


def test_checkpoint_without_readable_manifest_is_ordered_by_step_in_the_latest_generation(
    job, tmp_path: Path
) -> None:
    for step, generation in ((10, 1), (20, 1), (15, 2), (17, 2), (12, 2)):
        job.save(tmp_path, step, generation=generation)
    for step in (17, 12):
        os.truncate(tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json", 99)
    skipped: list[str] = []
    found = newest_valid(tmp_path, lambda path, error: skipped.append(path.name))
    assert found is not None
    assert (found[0].name, skipped) == ("step-00000015", ["step-00000017"])


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.safetensors"])
def test_prune_does_not_count_a_damaged_checkpoint(job, tmp_path: Path, name: str) -> None:
    paths = [job.save(tmp_path, step) for step in (10, 20, 30, 40)]
    os.truncate(paths[3] / name, 7)
    prune(tmp_path, keep=2)
    assert _names(tmp_path) == ["step-00000040", "step-00000030", "step-00000020"]
    job.save(tmp_path, 50)
    job.save(tmp_path, 60)
    prune(tmp_path, keep=2)
    assert _names(tmp_path) == ["step-00000060", "step-00000050"]


def test_prune_removes_what_dead_attempts_left_and_nothing_else(job, tmp_path: Path) -> None:
    root = job.save(tmp_path, 10).parent
    job.write(tmp_path, 20)
    (root / "step-00000007.trash-0123abcd" / "inner").mkdir(parents=True)
    (root / "step-00000007.replaced-0123abcd.trash-0123abcd").mkdir()
    (root / "LATEST.tmp-0123abcd").touch()
    (root / "EPOCH.tmp-0123abcd").touch()
    (root / "notes.tmp").touch()
    prune(tmp_path, keep=1)
    left = {entry.name for entry in root.iterdir()}
    assert left == {"LATEST", "notes.tmp", "step-00000010"}


def test_prune_that_dies_half_way_leaves_no_half_checkpoint(
    job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        job.save(tmp_path, step)

    def unlink(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, keep=1)
    assert _names(tmp_path) == ["step-00000020"]
    prune(tmp_path, keep=1)
    entries = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert entries == ["LATEST", "step-00000020"]


def test_undeletable_checkpoint_is_a_checkpoint_error_that_names_it(
    job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        job.save(tmp_path, step)

    def rename(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match=r"step-00000010: cannot be deleted: .*denied"):
        prune(tmp_path, keep=1)


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep is 0; expected to keep at least 1 checkpoint"):
        prune(tmp_path, keep=0)


def test_checkpoints_directory_that_cannot_be_listed_is_not_taken_for_empty(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="checkpoints: cannot be read"):
        newest_valid(tmp_path, _never)
