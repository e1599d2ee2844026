"""Uploads of a job's checkpoints, one after another, while it trains on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from zmqtrain.compute.offload import in_daemon
from zmqtrain.errors import CheckpointError
from zmqtrain.job import Job
from zmqtrain.store.logdir import checkpoints
from zmqtrain.store.remote import OpenedCheckpoint, RemoteCheckpoints

LOOK_S = 0.25
STOPPED_S = 30.0
"""How long the end of a job that is stopped waits for an upload."""

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
            CheckpointError: the address cannot be used, or its checkpoints are damaged. If the
                logdir has a checkpoint, that is only logged: a job that runs goes on.
        """
        if not self._address:
            return
        log.info("looking for newer checkpoints at %s", self._address)
        self._remote = remote = await in_daemon(RemoteCheckpoints, self._address)
        try:
            await in_daemon(remote.check)
            found = await in_daemon(remote.fetch_newer, logdir)
        except CheckpointError as error:
            if not checkpoints(logdir):
                raise
            log.error("%s; the job begins with the newest checkpoint of %s", error, logdir)
        else:
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

    async def finish(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until the newest checkpoint is there, but not for long if the job is stopped.

        Raises:
            CheckpointError: it could not be uploaded.
        """
        if self._uploading is not None:
            log.info("waiting for the upload to %s; Ctrl-C ends the job without it", self._address)
        since = time.monotonic()
        while (uploading := self._uploading) is not None:
            await asyncio.wait({uploading}, timeout=LOOK_S)
            if uploading.done():
                uploading.result()  # a bug is not lost
            elif not is_stopped():
                since = time.monotonic()
            elif time.monotonic() - since > STOPPED_S:
                self._give_up()
                raise CheckpointError(
                    f"the newest checkpoint was not uploaded to {self._address} within "
                    f"{STOPPED_S:g} s of the stop; it is in the logdir"
                )
        if self._failure is not None:
            raise self._failure

    def _give_up(self) -> None:
        if self._uploading is not None:
            self._uploading.cancel()
        if self._next is not None:
            self._next.close()

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
            await in_daemon(remote.put, opened, self._keep)
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
