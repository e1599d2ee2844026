"""Copies of checkpoints in a file system of fsspec: ``ADDRESS/checkpoints/step-00001200/``.

A copy counts once its manifest is there, which is written last and deleted first. The directories
are those of a logdir, so whatever copies them back makes one.
"""

from __future__ import annotations

import logging
import posixpath
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.hints import imported
from zmqtrain.store import checkpoint
from zmqtrain.store.durable import sync_path
from zmqtrain.store.logdir import HISTORY_FILE, checkpoints
from zmqtrain.store.manifest import MANIFEST_FILE, Manifest, read_manifest, verify

EXTRA = "remote"

log = logging.getLogger(__name__)


class OpenedCheckpoint:
    """The files of a checkpoint, open, so that it can be read even after it was deleted."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: the manifest cannot be read.
            OSError: a file cannot be opened.
        """
        self.path = path
        names = [*(file.file for file in read_manifest(path).files), MANIFEST_FILE]
        with ExitStack() as stack:
            self.files: Mapping[str, BinaryIO] = {
                name: stack.enter_context(open(path / name, "rb")) for name in names
            }
            self.history: BinaryIO | None = None
            with suppress(FileNotFoundError):  # there are no epochs
                self.history = stack.enter_context(open(path.parents[1] / HISTORY_FILE, "rb"))
            self.close = stack.pop_all().close


class _Copies(NamedTuple):
    """Whole copies by name, newest first; those without a manifest; the number of the others."""

    whole: list[tuple[str, Manifest]]
    begun: list[str]
    unreadable: int


class RemoteCheckpoints:
    """The copies at one address. All methods block."""

    def __init__(self, address: str) -> None:
        """``address``: such as ``s3://bucket/net``.

        Raises:
            ConfigError: fsspec, or its package for such addresses, is not installed.
        """
        fsspec = imported("fsspec", EXTRA)
        self.address = address
        try:
            self._files, root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"upload is {address!r}, and fsspec cannot open it: {error}; expected an address "
                "such as s3://bucket/net, whose package (for s3 that is s3fs) is installed"
            ) from error
        self._root = posixpath.join(root, "checkpoints")
        self._history = posixpath.join(root, HISTORY_FILE)

    def check(self) -> None:
        """Write a small file, and delete it.

        Raises:
            CheckpointError: that fails.
        """
        file = posixpath.join(self._root, "WRITABLE")
        with self._explaining("cannot be written to"):
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(file, b"")
            self._files.rm_file(file)

    def put(self, opened: OpenedCheckpoint, keep: int) -> None:
        """Write a checkpoint, and close it; then delete all but the ``keep`` newest ones.

        Raises:
            CheckpointError: it cannot be written. Older copies are untouched, but one of the same
                step is gone.
        """
        directory = posixpath.join(self._root, opened.path.name)
        with closing(opened), self._explaining("cannot be written to"):
            self._delete(directory)
            self._files.makedirs(directory, exist_ok=True)
            if opened.history is not None:
                self._write(self._history, opened.history)
            for name, file in opened.files.items():
                self._write(posixpath.join(directory, name), file)
        try:
            self._prune(opened.path.name, keep)
        except CheckpointError as error:
            log.warning("older checkpoints are left at %s: %s", self.address, error)

    def _write(self, path: str, file: BinaryIO) -> None:
        with self._files.open(path, "wb") as out:
            shutil.copyfileobj(file, out, 1 << 24)

    def _prune(self, latest: str, keep: int) -> None:
        copies = self._found()
        older = [name for name, _ in copies.whole if name != latest][max(0, keep - 1) :]
        with self._explaining("cannot be tidied up"):
            for name in [*older, *copies.begun]:
                self._delete(posixpath.join(self._root, name))

    def fetch_newer(self, logdir: Path) -> Path | None:
        """Copy the newest valid checkpoint into a logdir; None if that has one as new.

        Raises:
            CheckpointError: the address cannot be read; no copy is valid, and the logdir has no
                checkpoint, so training would begin afresh; or the logdir cannot be written to.
        """
        own = checkpoints(logdir)
        copies = self._found()
        for name, manifest in copies.whole:
            if any(_age_at(path) >= _age(manifest) for path in own):
                return None
            if (fetched := self._fetch(name, manifest, logdir)) is not None:
                return fetched
        if (number := len(copies.whole) + copies.unreadable) and not own:
            raise CheckpointError(
                f"{self.address}: none of its {number} checkpoints is valid; expected at least "
                "one; bring one back, or upload to a new address"
            )
        return None

    def _fetch(self, name: str, manifest: Manifest, logdir: Path) -> Path | None:
        """Copy a checkpoint into a logdir; None if it is damaged."""
        directory = posixpath.join(self._root, name)
        temporary = checkpoint.begin(logdir, manifest.global_step)
        with ExitStack() as failed:
            failed.callback(shutil.rmtree, temporary, ignore_errors=True)
            for written in manifest.files:
                if self._get(posixpath.join(directory, written.file), temporary / written.file):
                    sync_path(temporary / written.file)
            try:
                verify(temporary, manifest)
            except CheckpointError as error:
                log.error("skipping %s of %s: %s", name, self.address, error)
                return None
            failed.pop_all()
        draft = logdir / f".{HISTORY_FILE}"
        if self._get(self._history, draft):
            draft.replace(logdir / HISTORY_FILE)
        return checkpoint.commit(temporary, manifest)

    def _found(self) -> _Copies:
        whole, begun, unreadable = {}, [], 0
        with TemporaryDirectory(prefix="zmqtrain-") as place:
            for name in self._names():
                copy = Path(place, name)
                copy.mkdir()
                file = posixpath.join(self._root, name, MANIFEST_FILE)
                if not self._get(file, copy / MANIFEST_FILE):
                    begun.append(name)
                    continue
                try:
                    whole[name] = read_manifest(copy)
                except CheckpointError:  # perhaps it is of a later version, so it stays
                    unreadable += 1
        newest_first = sorted(whole.items(), key=lambda each: _age(each[1]), reverse=True)
        return _Copies(newest_first, begun, unreadable)

    def _get(self, file: str, to: Path) -> bool:
        """Copy a file here, if there is one; return whether there is."""
        with self._explaining("cannot be read"):
            try:
                self._files.get_file(file, str(to))
            except FileNotFoundError:
                to.unlink(missing_ok=True)
                return False
        return True

    def _names(self) -> list[str]:
        with self._explaining("cannot be read"):
            self._files.invalidate_cache()
            try:
                listed = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        names = (posixpath.basename(path.rstrip("/")) for path in listed)
        return [name for name in names if checkpoint.COMMITTED.fullmatch(name)]

    def _delete(self, directory: str) -> None:
        manifest = posixpath.join(directory, MANIFEST_FILE)
        if self._files.exists(manifest):
            self._files.rm_file(manifest)
        if self._files.exists(directory):
            self._files.rm(directory, recursive=True)

    @contextmanager
    def _explaining(self, failure: str) -> Iterator[None]:
        """Name the address in errors; each file system has classes of its own."""
        try:
            yield
        except Exception as error:
            text = str(error) or type(error).__name__
            raise CheckpointError(
                f"{self.address} {failure}: {text}; expected an address that this host reaches, "
                "with credentials that may list, read, write and delete"
            ) from error


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.generation, manifest.global_step


def _age_at(path: Path) -> tuple[int, int]:
    """Return the age of a checkpoint of a logdir, or that of none if it is damaged."""
    try:
        manifest = read_manifest(path)
        verify(path, manifest)
    except CheckpointError:
        return 0, -1
    return _age(manifest)
