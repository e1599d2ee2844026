"""Uploads of a job's checkpoints, one after another, while it trains on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from zmqtrain.errors import CheckpointError
from zmqtrain.job import Job
from zmqtrain.store.remote import OpenedCheckpoint, RemoteCheckpoints

log = logging.getLogger(__name__)


class Uploads:
    """Uploads to the address of a job. Without an address nothing happens."""

    def __init__(self, job: Job, on_failure: Callable[[str], None]) -> None:
        """``on_failure`` is told why a checkpoint was not uploaded."""
        self._address, self._keep = job.upload, job.keep_checkpoints
        self._on_failure = on_failure
        self._remote: RemoteCheckpoints | None = None
        self._next: OpenedCheckpoint | None = None
        self._uploading: asyncio.Task[None] | None = None
        self._failure: CheckpointError | None = None  # of the last upload

    async def fetch(self, logdir: Path) -> None:
        """Check the address, and take its newest checkpoint if the logdir has none as new.

        Raises:
            ConfigError: a package is missing.
            CheckpointError: the address cannot be written to, or its checkpoints are damaged.
        """
        if not self._address:
            return
        self._remote = await asyncio.to_thread(RemoteCheckpoints, self._address)
        await asyncio.to_thread(self._remote.check)
        found = await asyncio.to_thread(self._remote.fetch_newer, logdir)
        if found is not None:
            log.info("fetched %s of %s", found.name, self._address)

    def begin(self, path: Path) -> None:
        """Upload a checkpoint once the one before is there; of those that wait, the newest."""
        if self._remote is None:
            return
        try:
            opened = OpenedCheckpoint(path)
        except (OSError, CheckpointError) as error:
            return self._fail(CheckpointError(f"{path} cannot be uploaded: {error}"))
        if self._next is not None:
            self._next.close()
        self._next = opened
        if self._uploading is None:
            self._uploading = asyncio.create_task(self._upload(self._remote))

    async def finish(self) -> None:
        """Wait until the newest checkpoint is there.

        Raises:
            CheckpointError: it could not be uploaded.
        """
        if self._uploading is not None:
            await self._uploading
        if self._failure is not None:
            raise self._failure

    async def _upload(self, remote: RemoteCheckpoints) -> None:
        try:
            while (opened := self._next) is not None:
                self._next = None
                await self._put(remote, opened)
        finally:
            self._uploading = None

    async def _put(self, remote: RemoteCheckpoints, opened: OpenedCheckpoint) -> None:
        started = time.monotonic()
        try:
            await asyncio.to_thread(remote.put, opened, self._keep)
        except CheckpointError as error:
            self._fail(CheckpointError(f"{opened.path} was not uploaded: {error}"))
        else:
            self._failure = None
            took = time.monotonic() - started
            log.info("uploaded %s to %s in %.2f s", opened.path.name, remote.address, took)

    def _fail(self, failure: CheckpointError) -> None:
        self._failure = failure
        log.error("%s", failure)
        self._on_failure(str(failure))
