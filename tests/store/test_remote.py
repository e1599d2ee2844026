"""Copies of checkpoints at an address, and what comes back from there."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import zmqtrain
from tests.constants import Constants
from zmqtrain.callbacks import LambdaCallback
from zmqtrain.chief import uploads
from zmqtrain.data import NoisyLine
from zmqtrain.errors import CheckpointError, ConfigError, RunFailedError
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.store.logdir import checkpoints, newest_valid, step_of
from zmqtrain.store.remote import OpenedCheckpoint, RemoteCheckpoints

fsspec: Any = pytest.importorskip("fsspec")


def train(logdir: Path, steps: int, **options: Any) -> zmqtrain.Summary:
    model, data, optimizer = LinearRegression(), NoisyLine(), SGD(0.1)
    where = {"logdir": str(logdir), "steps": steps, "save_steps": 10, **options}
    if "epochs" in where:
        del where["steps"]
    return zmqtrain.run(zmqtrain.Job(model=model, data=data, optimizer=optimizer, **where))


def steps_at(place: Path) -> list[int]:
    return sorted(map(step_of, checkpoints(place)))


def upload_all(logdir: Path, remote: RemoteCheckpoints) -> None:
    for path in reversed(checkpoints(logdir)):
        remote.put(OpenedCheckpoint(path), keep=2)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def remote(place: Path) -> RemoteCheckpoints:
    return RemoteCheckpoints(f"file://{place}")


def test_newest_checkpoints_are_kept_at_the_address(
    tmp_path: Path, place: Path, remote: RemoteCheckpoints
) -> None:
    train(tmp_path / "own", 40)
    upload_all(tmp_path / "own", remote)
    assert steps_at(place) == [30, 40]


def test_open_checkpoint_is_copied_whole_after_it_was_deleted(
    tmp_path: Path, place: Path, remote: RemoteCheckpoints
) -> None:
    train(tmp_path / "own", 10)
    opened = OpenedCheckpoint(*checkpoints(tmp_path / "own"))
    for file in opened.path.iterdir():
        file.unlink()
    remote.put(opened, keep=1)
    assert newest_valid(place, lambda *_: None) is not None


def test_copy_without_a_manifest_does_not_count_and_is_deleted_by_the_next_upload(
    tmp_path: Path, place: Path, remote: RemoteCheckpoints
) -> None:
    train(tmp_path / "own", 20)
    new, old = checkpoints(tmp_path / "own")
    remote.put(OpenedCheckpoint(old), keep=2)
    (place / "checkpoints" / old.name / "manifest.json").unlink()
    (place / "checkpoints/notes").mkdir()
    assert remote.fetch_newer(tmp_path / "empty") is None
    remote.put(OpenedCheckpoint(new), keep=2)
    assert {path.name for path in (place / "checkpoints").iterdir()} == {new.name, "notes"}


def test_damaged_copy_is_skipped(tmp_path: Path, place: Path, remote: RemoteCheckpoints) -> None:
    train(tmp_path / "own", 20)
    upload_all(tmp_path / "own", remote)
    for file in (place / "checkpoints/step-00000020").glob("shard-*"):
        file.write_bytes(file.read_bytes()[:-4] + b"lost")
    remote.fetch_newer(tmp_path / "other")
    assert steps_at(tmp_path / "other") == [10]
    for file in (place / "checkpoints/step-00000010").glob("shard-*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is valid"):
        remote.fetch_newer(tmp_path / "third")


def test_checkpoint_that_cannot_be_read_is_neither_ignored_nor_deleted(
    tmp_path: Path, place: Path, remote: RemoteCheckpoints
) -> None:
    strange = place / "checkpoints/step-00000005/manifest.json"
    strange.parent.mkdir(parents=True)
    strange.write_text("of a later version")
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints is valid"):
        remote.fetch_newer(tmp_path / "own")
    train(tmp_path / "own", 10)
    remote.put(OpenedCheckpoint(*checkpoints(tmp_path / "own")), keep=1)
    assert strange.exists()


def test_logdir_gets_the_newest_checkpoint_of_a_later_life_elsewhere(tmp_path: Path) -> None:
    upload = f"file://{tmp_path}/bucket"
    train(tmp_path / "here", 20, upload=upload)
    train(tmp_path / "there", 30, upload=upload)
    back = train(tmp_path / "here", 40, upload=upload)
    assert steps_at(tmp_path / "there") == [20, 30]
    assert steps_at(tmp_path / "here") == [10, 20, 30, 40]
    whole = train(tmp_path / "whole", 40)
    assert back.parameters["weights"] == whole.parameters["weights"]


def test_own_checkpoint_is_used_if_it_is_as_new(tmp_path: Path, remote: RemoteCheckpoints) -> None:
    train(tmp_path / "own", 20)
    upload_all(tmp_path / "own", remote)
    assert remote.fetch_newer(tmp_path / "own") is None


def test_address_that_cannot_be_written_to_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file://.*/file/run cannot be written to: .*expect"):
        train(tmp_path / "own", 10, upload=f"file://{tmp_path}/file/run")
    with pytest.raises(ConfigError, match=r"upload is 'gopher://a/b'.*Protocol not known.*expect"):
        train(tmp_path / "own", 10, upload="gopher://a/b")


def test_result_of_a_job_whose_last_checkpoint_was_not_uploaded_says_so(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"

    def lose(logs: object) -> None:
        (bucket / "checkpoints").rmdir()
        (bucket / "checkpoints").touch()

    callbacks = [LambdaCallback(on_train_end=lose)]
    with pytest.raises(RunFailedError, match=r"step 30 of 30 is done, but .* was not uploaded: "):
        train(tmp_path / "own", 30, upload=f"file://{bucket}", callbacks=callbacks, save_steps=0)
    assert steps_at(tmp_path / "own") == [30]


def test_damaged_checkpoint_of_the_logdir_is_replaced_by_the_copy(
    tmp_path: Path, remote: RemoteCheckpoints
) -> None:
    train(tmp_path / "own", 20)
    upload_all(tmp_path / "own", remote)
    for file in (tmp_path / "own/checkpoints/step-00000020").glob("shard-*"):
        file.write_bytes(b"damaged")
    remote.fetch_newer(tmp_path / "own")
    found = newest_valid(tmp_path / "own", lambda *_: None)
    assert found is not None and step_of(found[0]) == 20


def test_upload_is_kept_whatever_is_at_the_address(
    tmp_path: Path, place: Path, remote: RemoteCheckpoints
) -> None:
    train(tmp_path / "later", 40)
    remote.put(OpenedCheckpoint(checkpoints(tmp_path / "later")[0]), keep=1)
    train(tmp_path / "own", 20)
    remote.put(OpenedCheckpoint(checkpoints(tmp_path / "own")[0]), keep=1)
    assert steps_at(place) == [20]


def test_epochs_go_on_elsewhere_with_their_history(tmp_path: Path) -> None:
    upload = f"file://{tmp_path}/bucket"
    epochs = {"steps": 1000, "save_steps": 0, "upload": upload}
    train(tmp_path / "here", **epochs, epochs=2)
    elsewhere = train(tmp_path / "there", **epochs, epochs=3)
    assert elsewhere.history.epoch == [0, 1, 2]


def address_that_calls(call: Callable[[], object], directory: Path) -> str:
    """Return an address that calls this before a file of a checkpoint is written or deleted."""
    local = fsspec.get_filesystem_class("file")

    class Files(local):  # type: ignore[misc]
        protocol = "calling"

        @classmethod
        def _strip_protocol(cls, path: str) -> Any:
            return local._strip_protocol(path.removeprefix("calling://"))

        def open(self, path: str, *given: Any, **named: Any) -> Any:
            if "/step-" in path:
                call()
            return super().open(path, *given, **named)

        def rm_file(self, path: str) -> None:
            if "/step-" in path:
                call()
            super().rm_file(path)

        def rm(self, path: str, **recursive: bool) -> None:
            for file in sorted(self.find(path), reverse=True):  # as no file system promises
                self.rm_file(file)
            super().rm(path, **recursive)

    fsspec.register_implementation("calling", Files, clobber=True)
    return f"calling://{directory}/bucket"


@pytest.mark.parametrize(
    ("done", "newest"), [(0, 20), (1, 10), (2, 10), (3, 10), (4, 20), (5, 20), (6, 20)]
)
def test_upload_that_breaks_off_leaves_nothing_half_that_counts(
    done: int, newest: int, tmp_path: Path, remote: RemoteCheckpoints
) -> None:
    train(tmp_path / "own", 20)
    upload_all(tmp_path / "own", remote)
    rest = iter(range(done))

    def work() -> None:
        if next(rest, None) is None:
            raise OSError("the connection is lost")

    breaking = RemoteCheckpoints(address_that_calls(work, tmp_path))
    with pytest.raises(CheckpointError) if done < 4 else nullcontext():
        breaking.put(OpenedCheckpoint(checkpoints(tmp_path / "own")[0]), keep=1)
    remote.fetch_newer(tmp_path / "other")
    assert steps_at(tmp_path / "other") == [newest]


async def test_newest_checkpoint_that_waits_is_uploaded_after_one_that_fails(
    tmp_path: Path, place: Path
) -> None:
    train(tmp_path / "own", 40)
    first, second, third, last = reversed(checkpoints(tmp_path / "own"))
    has_begun, may_fail, failures = Event(), Event(), list[str]()

    def fail_once() -> None:
        if not has_begun.is_set():
            has_begun.set()
            may_fail.wait()
            raise OSError("the connection is lost")

    job = zmqtrain.Job(
        model=LinearRegression(), data=NoisyLine(), optimizer=SGD(), keep_checkpoints=2,
        logdir=str(tmp_path), upload=address_that_calls(fail_once, tmp_path),
    )  # fmt: skip
    made = uploads.Uploads(job, failures.append)
    await made.fetch(tmp_path / "own")
    made.begin(first)
    await asyncio.to_thread(has_begun.wait)
    made.begin(second)
    made.begin(third)
    may_fail.set()
    await made.finish(lambda: False)
    made.begin(last)
    await made.finish(lambda: False)
    assert (steps_at(place), len(failures)) == ([30, 40], 1)
    made.begin(place / "gone")
    with pytest.raises(CheckpointError, match="gone cannot be uploaded"):
        await made.finish(lambda: False)


def test_job_that_is_stopped_does_not_wait_for_an_upload_without_end(
    tmp_path: Path, constants: Constants, caplog: pytest.LogCaptureFixture
) -> None:
    never = Event()
    constants(uploads, STOPPED_S=0.3)

    def stop(logs: object) -> None:
        signal.raise_signal(signal.SIGINT)

    callbacks = [LambdaCallback(on_train_begin=stop)]
    with pytest.raises(KeyboardInterrupt):
        upload = address_that_calls(never.wait, tmp_path)
        train(tmp_path / "own", 30, upload=upload, callbacks=callbacks)
    never.set()
    for thread in threading.enumerate():
        if thread.name == "daemon":
            thread.join()
    assert "was not uploaded" in caplog.text


def test_address_that_cannot_be_reached_does_not_end_a_job_that_has_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "own", 10)
    (tmp_path / "file").touch()
    with pytest.raises(RunFailedError, match=r"step 20 of 20 is done, but .* was not uploaded"):
        train(tmp_path / "own", 20, upload=f"file://{tmp_path}/file/run")
    assert "the job begins with the newest checkpoint of" in caplog.text


def test_bug_in_an_upload_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(remote: RemoteCheckpoints, opened: OpenedCheckpoint, keep: int) -> None:
        opened.close()
        raise LookupError("a bug")

    monkeypatch.setattr(RemoteCheckpoints, "put", put)
    with pytest.raises(LookupError, match="a bug"):
        train(tmp_path / "own", 10, upload=f"file://{tmp_path}/bucket")
