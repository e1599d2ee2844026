"""A job's checkpoints: when to save, what goes into the manifest, which one to resume from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from zmqtrain.coordination.ledger import LedgerState
from zmqtrain.errors import CheckpointError
from zmqtrain.job import Job, changes_since
from zmqtrain.observe.metrics import Metrics
from zmqtrain.store import checkpoint
from zmqtrain.store import logdir as logdirs
from zmqtrain.store.layout import variables_of
from zmqtrain.store.manifest import PARAMETERS, Manifest, ShardFile, WorkerMark, tensor_records
from zmqtrain.store.placement import place
from zmqtrain.wire.messages import Saved

log = logging.getLogger(__name__)


class Saver:
    """Checkpoints of one job. Without a logdir nothing is ever due."""

    def __init__(
        self,
        job: Job,
        shards: int,
        fingerprint: Mapping[str, str],
        metrics: Metrics,
        write_shards: Callable[[Path], Awaitable[Saved]],
    ) -> None:
        """``write_shards`` writes every shard into a directory, all at one version."""
        self._job, self._shards, self._fingerprint = job, shards, fingerprint
        self._metrics = metrics
        self._write_shards = write_shards
        self._logdir = Path(job.logdir).resolve() if job.logdir else None
        self._interval_s = job.save_secs if self._logdir is not None else 0.0
        self._due_at = time.monotonic() + self._interval_s
        self._found_damage = False  # in a checkpoint of the logdir
        self.last: str | None = None
        self.last_step = 0
        metrics.checkpoint_interval_seconds.set(self._interval_s)

    def is_due(self) -> bool:
        return self._interval_s > 0 and time.monotonic() >= self._due_at

    async def check(self) -> None:
        """Check at the start that checkpoints can be written to the logdir.

        Raises:
            CheckpointError: they cannot; the text says why.
        """
        if self._logdir is None:
            return
        try:
            probe = await asyncio.to_thread(checkpoint.begin, self._logdir, 0)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; choose another directory with --logdir") from error
        probe.rmdir()

    @contextlib.asynccontextmanager
    async def shared_directory(self) -> AsyncIterator[str]:
        """Yield a new directory in the logdir, which every ps must find; "" without a logdir."""
        made = None
        if self._logdir is not None:
            try:
                made = await asyncio.to_thread(checkpoint.begin, self._logdir, 0)
            except CheckpointError as error:  # it worked at the start: the job goes on
                log.warning("could not check that all ps share the logdir: %s", error)
        try:
            yield str(made or "")
        finally:
            if made is not None:
                with contextlib.suppress(OSError):
                    made.rmdir()

    async def newest(self) -> tuple[Path | None, int]:
        """Return the newest valid checkpoint (None if there is none) and the last generation."""
        if self._logdir is None:
            return None, 0
        found = await asyncio.to_thread(logdirs.newest_valid, self._logdir, self._skipped)
        root = checkpoint.checkpoints_directory(self._logdir)
        generation = await asyncio.to_thread(logdirs.last_generation, root)
        if found is None:
            return None, generation
        path, manifest = found
        level = logging.WARNING if self._found_damage else logging.INFO
        log.log(level, "resuming from %s, step %d", path, manifest.global_step)
        self._log_changes(manifest)
        return path, max(generation, manifest.generation)

    async def note_generation(self, generation: int) -> None:
        """Store the number of the generation that begins; the job goes on if this fails."""
        if self._logdir is None:
            return
        root = checkpoint.checkpoints_directory(self._logdir)
        try:
            await asyncio.to_thread(logdirs.note_generation, root, generation)
        except CheckpointError as error:
            log.warning("could not store the number of generation %d: %s", generation, error)

    async def save(self, step: int, generation: int) -> Path | None:
        """Write a checkpoint and return its directory; without a logdir do nothing, return None.

        Raises:
            CheckpointError: it failed; older checkpoints are untouched.
        """
        if self._logdir is None:
            return None
        self._due_at += max(self._interval_s, time.monotonic() - self._due_at)
        started = time.monotonic()
        try:
            path = await self._save(self._logdir, step, generation)
        except CheckpointError as error:
            self._metrics.checkpoint_failures.manifest.inc()
            log.error("no checkpoint at step %d: %s", step, error)
            raise
        self._metrics.checkpoint_duration_seconds.observe(time.monotonic() - started)
        self._metrics.checkpoint_last_success_timestamp_seconds.set_to_current_time()
        self.last = str(path)
        log.info("saved %s in %.2f s", path, time.monotonic() - started)
        return path

    async def _save(self, logdir: Path, step: int, generation: int) -> Path:
        temporary = await asyncio.to_thread(checkpoint.begin, logdir, step)
        try:
            saved = await self._write_shards(temporary)
            files = [ShardFile(*astuple(file)) for file in saved.files]
            if frozen := self._job.frozen():
                write = partial(checkpoint.write_frozen, temporary, frozen, self._shards)
                files.append(await asyncio.to_thread(write))
            manifest = self._manifest(saved, files, generation)
            path = await asyncio.to_thread(checkpoint.commit, temporary, manifest)
        except CheckpointError:
            await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
            raise
        await asyncio.to_thread(logdirs.prune, logdir, self._job.keep_checkpoints)
        self._metrics.checkpoint_bytes.set(sum(file.nbytes for file in files))
        self.last_step = saved.step
        return path

    def _manifest(self, saved: Saved, files: Sequence[ShardFile], generation: int) -> Manifest:
        frozen = variables_of(self._job.frozen(), "frozen")
        (unshared,) = place(frozen, 1)
        layouts = [*self._job.layouts(self._shards), replace(unshared, shard=self._shards)]
        ledger = LedgerState(
            next_batch=saved.next_batch,
            open_batches=saved.open_batches,
            examples=saved.examples,
            limit=saved.limit,
            pass_examples=saved.pass_examples,
            pass_loss=saved.pass_loss,
        )
        slots = [slot.name for slot in self._job.update().slots]
        try:
            return Manifest(
                fingerprint=dict(self._fingerprint),
                generation=generation,
                global_step=saved.step,
                policy=saved.policy,
                ledger=ledger.model_dump(mode="json", exclude_defaults=True),
                worker_marks={
                    f"worker {mark.worker}": WorkerMark(*astuple(mark)) for mark in saved.marks
                },
                files=tuple(files),
                tensors=tensor_records((*self._job.variables(), *frozen), layouts, slots),
            )
        except ValidationError as error:
            raise CheckpointError(f"the shards' reports do not fit together: {error}") from error

    def _log_changes(self, manifest: Manifest) -> None:
        """Log in one line how the job differs from the one that saved a checkpoint."""
        if manifest.global_step >= self._job.steps:
            log.warning(
                "the checkpoint is of step %d and the job ends at step %d, so there is nothing to "
                "train; give a larger --steps, or another --logdir",
                manifest.global_step,
                self._job.steps,
            )
        changes = changes_since(manifest.fingerprint, self._fingerprint)
        if not changes:
            return
        slots = {PARAMETERS, *(slot.name for slot in self._job.update().slots)}
        lost = ", ".join(sorted(manifest.tensors.keys() - slots))
        also = f"; the checkpoint's optimizer slots {lost} are not used" if lost else ""
        log.warning("the job has changed since the checkpoint was saved: %s%s", changes, also)

    def _skipped(self, path: Path, error: CheckpointError) -> None:
        self._metrics.checkpoint_failures.restore.inc()
        self._found_damage = True
        log.error("skipping checkpoint %s: %s", path.name, error)
