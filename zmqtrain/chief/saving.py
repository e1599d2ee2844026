"""Keeping a job's checkpoints: when to save, what to write down, which one to resume from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import astuple
from pathlib import Path

from pydantic import ValidationError

from zmqtrain.coordination.ledger import LedgerState
from zmqtrain.errors import CheckpointError
from zmqtrain.job import Job, changes_since
from zmqtrain.observe.metrics import Metrics
from zmqtrain.store import checkpoint
from zmqtrain.store import logdir as logdirs
from zmqtrain.store.manifest import PARAMETERS, Manifest, ShardFile, WorkerMark, tensor_records
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
        """``write_shards`` has every shard write itself into a directory, all at one version."""
        self._job, self._shards, self._fingerprint = job, shards, fingerprint
        self._metrics = metrics
        self._write_shards = write_shards
        self._logdir = Path(job.logdir).resolve() if job.logdir else None
        self._interval_s = job.save_secs if self._logdir is not None else 0.0
        self._due_at = time.monotonic() + self._interval_s
        self._found_damage = False  # among the checkpoints that were there
        self.last: str | None = None
        self.last_step = 0
        metrics.checkpoint_interval_seconds.set(self._interval_s)

    def is_due(self) -> bool:
        return self._interval_s > 0 and time.monotonic() >= self._due_at

    async def check(self) -> None:
        """Find out at the start, not after hours, whether the logdir takes checkpoints.

        Raises:
            CheckpointError: it does not; the text says why.
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
        """Yield a new directory in the logdir, which every ps must find; "" if there is none."""
        made = None
        if self._logdir is not None:
            try:
                made = await asyncio.to_thread(checkpoint.begin, self._logdir, 0)
            except CheckpointError as error:  # it was there at the start: the job goes on
                log.warning("not shown that all ps share the logdir: %s", error)
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
        found = await asyncio.to_thread(logdirs.newest_valid, self._logdir, self._passed_over)
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
        """Make durable that a generation begins; where that cannot be, the job goes on without."""
        if self._logdir is None:
            return
        root = checkpoint.checkpoints_directory(self._logdir)
        try:
            await asyncio.to_thread(logdirs.note_generation, root, generation)
        except CheckpointError as error:
            log.warning("the number of generation %d is not kept: %s", generation, error)

    async def save(self, step: int, generation: int) -> Path | None:
        """Write a checkpoint and return its directory; None, and nothing, without a logdir.

        Raises:
            CheckpointError: it failed; what was saved before is untouched.
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
        saved = await self._write_shards(temporary)
        try:
            manifest = self._manifest(saved, generation)
        except ValidationError as error:
            raise CheckpointError(f"the shards' reports make no checkpoint: {error}") from error
        path = await asyncio.to_thread(checkpoint.commit, temporary, manifest)
        await asyncio.to_thread(logdirs.prune, logdir, self._job.keep_checkpoints)
        self._metrics.checkpoint_bytes.set(sum(file.nbytes for file in saved.files))
        self.last_step = saved.step
        return path

    def _manifest(self, saved: Saved, generation: int) -> Manifest:
        layouts = self._job.layouts(self._shards)
        ledger = LedgerState(
            next_batch=saved.next_batch, open_batches=saved.open_batches, examples=saved.examples
        )
        slots = [slot.name for slot in self._job.update().slots]
        return Manifest(
            fingerprint=dict(self._fingerprint),
            generation=generation,
            global_step=saved.step,
            policy=saved.policy,
            ledger=ledger.model_dump(mode="json"),
            worker_marks={
                f"worker {mark.worker}": WorkerMark(*astuple(mark)) for mark in saved.marks
            },
            files=tuple(ShardFile(*astuple(file)) for file in saved.files),
            tensors=tensor_records(self._job.variables(), layouts, slots),
        )

    def _log_changes(self, manifest: Manifest) -> None:
        """Log in one line how the job differs from the one that saved a checkpoint."""
        if manifest.global_step >= self._job.steps:
            log.warning(
                "the checkpoint is of step %d, and the job ends at step %d: there is nothing to "
                "train; raise steps, or choose another logdir",
                manifest.global_step,
                self._job.steps,
            )
        changes = changes_since(manifest.fingerprint, self._fingerprint)
        if not changes:
            return
        slots = {PARAMETERS, *(slot.name for slot in self._job.update().slots)}
        lost = ", ".join(sorted(manifest.tensors.keys() - slots))
        also = f"; the optimizer's {lost} of the checkpoint are not used" if lost else ""
        log.warning("this job is not as it was when it was saved: %s%s", changes, also)

    def _passed_over(self, path: Path, error: CheckpointError) -> None:
        self._metrics.checkpoint_failures.restore.inc()
        self._found_damage = True
        log.error("passing over checkpoint %s: %s", path.name, error)
