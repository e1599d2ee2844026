"""A job's checkpoints: their times, their manifests, and the one to resume from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from numpy.typing import NDArray
from pydantic import ValidationError

from zmqtrain.chief.uploads import Uploads
from zmqtrain.compute.offload import in_daemon
from zmqtrain.config.options import names_of
from zmqtrain.errors import CheckpointError
from zmqtrain.fingerprint import changes_since
from zmqtrain.job import Job
from zmqtrain.observe.metrics import Metrics
from zmqtrain.optim import AVERAGE
from zmqtrain.policies import make_policy
from zmqtrain.protocol.checkpoint import Saved, ShardFile
from zmqtrain.store import checkpoint
from zmqtrain.store import logdir as logdirs
from zmqtrain.store.durable import digest_file
from zmqtrain.store.layout import ShardLayout, variables_of
from zmqtrain.store.manifest import PARAMETERS, Manifest, TensorRecord, tensor_records
from zmqtrain.store.placement import place
from zmqtrain.store.table_checkpoint import given_rows, table_records
from zmqtrain.units import shortened

log = logging.getLogger(__name__)


class Saver:
    """Checkpoints of one job. Without a logdir nothing is ever due."""

    def __init__(
        self,
        job: Job,
        layouts: Sequence[ShardLayout],
        fingerprint: Mapping[str, str],
        metrics: Metrics,
        write_shards: Callable[[Path], Awaitable[Saved]],
        report: Callable[[str, str], None] = lambda path, failure: None,
    ) -> None:
        """``write_shards`` writes shards of these layouts into a directory, all at one version.

        ``report`` gets the path of each checkpoint and "", or "" and why there is none.
        """
        self._job, self._layouts, self.fingerprint = job, layouts, fingerprint
        self._metrics = metrics
        self._write_shards, self._report = write_shards, report
        self._uploads = Uploads(job, self._upload_failed)
        self._logdir = Path(job.logdir).resolve() if job.logdir else None
        for name in ("save_secs", "save_steps"):
            if self._logdir is None and name in job.model_fields_set:
                text = "%s is %g, but the job has no logdir: it saves nothing; give %s"
                log.warning(text, name, getattr(job, name), names_of("logdir"))
        self._interval_s = job.save_secs if self._logdir is not None else 0.0
        self._due_at = time.monotonic() + self._interval_s
        self._tried_step = 0  # that of the last attempt, or of the checkpoint that was restored
        self._found_damage = False  # in a checkpoint of the logdir
        self._frozen: tuple[Path, ShardFile] | None = None  # where and how they were written last
        self.last: str | None = None
        self.last_step = 0
        metrics.checkpoint_interval_seconds.set(self._interval_s)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint of this step is due.

        While a job stands still, its last one is as good as a new one, and counts as that.
        """
        every = self._job.save_steps
        if self._logdir is not None and every and step // every > self._tried_step // every:
            return True
        if not self._interval_s or time.monotonic() < self._due_at:
            return False
        if self.last is None or step != self.last_step:
            return True
        self._due_at = time.monotonic() + self._interval_s
        self._metrics.checkpoint_last_success_timestamp_seconds.set_to_current_time()
        return False

    async def check(self) -> None:
        """Check at the start that checkpoints can be written to the logdir, and uploaded.

        The newest one at the address of ``upload`` is fetched if the logdir has none as new.

        Raises:
            CheckpointError: they cannot; the text has the reason.
            ConfigError: a package for uploads is missing.
        """
        if self._logdir is None:
            return
        try:
            probe = await in_daemon(checkpoint.begin, self._logdir, 0)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; choose another directory with --logdir") from error
        probe.rmdir()
        await self._uploads.fetch(self._logdir)

    @contextlib.asynccontextmanager
    async def shared_directory(self) -> AsyncIterator[str]:
        """Yield a new directory in the logdir, which every ps must find; "" without a logdir."""
        made = None
        if self._logdir is not None:
            try:
                made = await in_daemon(checkpoint.begin, self._logdir, 0)
            except CheckpointError as error:  # it worked at the start: the job goes on
                log.warning("could not check that all ps share the logdir: %s", error)
        try:
            yield str(made or "")
        finally:
            if made is not None:
                with contextlib.suppress(OSError):
                    made.rmdir()

    async def newest(self) -> tuple[Path | None, int, int]:
        """Return the newest valid checkpoint (None if there is none), its generation, the last one.

        Raises:
            CheckpointError: there are checkpoints, and none is valid, or it has unknown variables.
        """
        if self._logdir is None:
            return None, 0, 0
        found = await in_daemon(logdirs.newest_valid, self._logdir, self._skipped)
        root = checkpoint.checkpoints_directory(self._logdir)
        generation = await in_daemon(logdirs.last_generation, root)
        self._tried_step = 0 if found is None else found[1].global_step
        if found is None:
            return None, 0, generation
        path, manifest = found
        level = logging.WARNING if self._found_damage else logging.INFO
        log.log(level, "resuming from %s, step %d", path, manifest.global_step)
        self._check_known(path, manifest)
        self._log_changes(manifest)
        return path, manifest.generation, max(generation, manifest.generation)

    async def has_later(self, generation: int) -> bool:
        """Return whether there is a checkpoint of a later generation, which has not begun."""
        if self._logdir is None:
            return False
        latest = await in_daemon(logdirs.latest_generation, self._logdir)
        if latest <= generation:
            return False
        with contextlib.suppress(CheckpointError):  # none is valid, so none can begin
            found = await in_daemon(logdirs.newest_valid, self._logdir, self._skipped)
            return found is not None and found[1].generation > generation
        return False

    @contextlib.asynccontextmanager
    async def with_weights(
        self, weights: Mapping[str, Any], generation: int
    ) -> AsyncIterator[Path]:
        """Yield a checkpoint of now with other weights, with which this generation can begin.

        Raises:
            CheckpointError: it cannot be written.
        """
        made: contextlib.AbstractContextManager[str | Path] = (
            TemporaryDirectory(prefix="zmqtrain-")
            if self._logdir is None
            else contextlib.nullcontext(self._logdir)
        )
        with made as logdir:
            yield await self._save(Path(logdir), self.last_step, generation, weights)

    async def use(self, step: int, generation: int, use: Callable[[Path], None]) -> None:
        """Call ``use`` in a thread with a checkpoint of now, which is deleted; see :meth:`save`."""
        async with self.shared_directory() as directory:
            logdir = await asyncio.to_thread(mkdtemp, prefix="zmqtrain-", dir=directory or None)
            try:
                await asyncio.to_thread(use, await self._save(Path(logdir), step, generation))
            finally:  # it may be large, so the loop goes on meanwhile
                await asyncio.to_thread(shutil.rmtree, logdir, ignore_errors=True)

    async def note_generation(self, generation: int) -> None:
        """Store the number of the generation that begins; the job goes on if this fails."""
        if self._logdir is None:
            return
        root = checkpoint.checkpoints_directory(self._logdir)
        try:
            await in_daemon(logdirs.note_generation, root, generation)
        except CheckpointError as error:
            log.warning("could not store the number of generation %d: %s", generation, error)

    async def save(self, step: int, generation: int) -> Path | None:
        """Write a checkpoint and return its directory; without a logdir do nothing, return None.

        Raises:
            CheckpointError: it failed; older checkpoints are untouched.
        """
        if self._logdir is None:
            return None
        self._tried_step = step
        self._due_at += max(self._interval_s, time.monotonic() - self._due_at)
        started = time.monotonic()
        try:
            path = await self._save(self._logdir, step, generation)
        except CheckpointError as error:
            self._metrics.checkpoint_failures.manifest.inc()
            log.error("no checkpoint at step %d: %s", step, error)
            self._report("", str(error))
            raise
        self._metrics.checkpoint_duration_seconds.observe(time.monotonic() - started)
        self._metrics.checkpoint_last_success_timestamp_seconds.set_to_current_time()
        self.last = str(path)
        self._report(self.last, "")
        log.info("saved %s in %.2f s", path, time.monotonic() - started)
        self._uploads.begin(path)
        return path

    async def finish(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until the last checkpoint is uploaded, if the job uploads.

        ``is_stopped``: returns whether the job was told to end, which limits the wait.

        Raises:
            CheckpointError: it could not be.
        """
        await self._uploads.finish(is_stopped)

    def _upload_failed(self, failure: str) -> None:
        self._metrics.checkpoint_failures.upload.inc()
        self._report(self.last or "", failure)

    async def _save(
        self, logdir: Path, step: int, generation: int, weights: Mapping[str, Any] | None = None
    ) -> Path:
        """``weights``: values of all variables, to be saved instead of the current ones."""
        temporary = await asyncio.to_thread(checkpoint.begin, logdir, step)
        with _removed_on(temporary, BaseException):  # a cancelled attempt, too
            saved = await self._write_shards(temporary)
            files = list(saved.files)
            if weights is not None:
                file = temporary / "weights.safetensors"
                whole = checkpoint.whole_variables(weights)
                write = partial(checkpoint.write_values, file, whole, len(self._layouts))
                files.append(await asyncio.to_thread(write))
            elif self._unchanging():
                files.append(await asyncio.to_thread(self._write_frozen, temporary))
            manifest = self._manifest(saved, files, generation, all_apart=weights is not None)
        with _removed_on(temporary, CheckpointError):  # its thread goes on if this is cancelled
            path = await asyncio.to_thread(checkpoint.commit, temporary, manifest)
        await asyncio.to_thread(logdirs.prune, logdir, self._job.keep_checkpoints)
        if logdir == self._logdir:
            self._metrics.checkpoint_bytes.set(sum(file.nbytes for file in files))
            self.last_step = saved.step
            if weights is None and self._unchanging():
                self._frozen = path / files[-1].file, files[-1]
        return path

    def _unchanging(self) -> dict[str, NDArray[Any]]:
        """Return the tensors that never change: frozen variables, first arrays of tables."""
        given = given_rows(self._job.table_variables())
        return checkpoint.whole_variables(self._job.frozen()) | given

    def _write_frozen(self, directory: Path) -> ShardFile:
        """Write the tensors that never change; once, then all checkpoints have the same file."""
        if self._frozen is not None:
            path, written = self._frozen
            with contextlib.suppress(OSError):  # a file system without links, a deleted file
                if digest_file(path) == written.blake2b:  # else it was damaged since
                    os.link(path, directory / path.name)
                    return written
        file = directory / "frozen.safetensors"
        return checkpoint.write_values(file, self._unchanging(), len(self._layouts))

    def _tensors(self, *, all_apart: bool) -> dict[str, dict[str, TensorRecord]]:
        """Return where each value is: frozen variables, or all, in a file beside the shards'."""
        job = self._job
        frozen = variables_of(job.frozen(), "frozen")
        variables = (*job.variables(), *frozen)
        slots = job.update().initial_slots(v.name for v in variables if v.kind == "trained")
        (unshared,) = place(variables if all_apart else frozen, 1, partition_nbytes=0)
        shards, beside = self._layouts, replace(unshared, shard=len(self._layouts))
        if not all_apart:
            return tensor_records(variables, [*shards, beside], slots)
        apart = tensor_records(variables, [beside], {})[PARAMETERS]
        trained = {name: record for name, record in apart.items() if record.kind == "trained"}
        averages = {AVERAGE: trained} if AVERAGE in slots else {}
        return tensor_records(job.variables(), shards, slots) | {PARAMETERS: apart} | averages

    def _manifest(
        self, saved: Saved, files: Sequence[ShardFile], generation: int, *, all_apart: bool
    ) -> Manifest:
        try:
            return Manifest(
                fingerprint=dict(self.fingerprint),
                generation=generation,
                global_step=saved.step,
                policy=saved.policy,
                ledger=saved.ledger,
                learning_rate=saved.learning_rate,
                worker_marks={f"worker {mark.worker}": mark for mark in saved.marks},
                files=tuple(files),
                tensors=self._tensors(all_apart=all_apart),
                tables=table_records(self._job.table_layouts()),
            )
        except ValidationError as error:
            raise CheckpointError(f"the shards' reports do not fit together: {error}") from error

    def _check_known(self, path: Path, manifest: Manifest) -> None:
        """Refuse a checkpoint with variables that the job would leave out."""
        job = self._job
        own = {*job.frozen(), *(each.name for each in job.variables())}
        own |= {table.name for table in job.table_variables()}
        saved = [each.name for each in manifest.variables()] + list(manifest.tables)
        if unknown := [name for name in saved if name not in own]:
            raise CheckpointError(
                f"{path} has variables that {job.model!r} does not have: {shortened(unknown)}; go "
                f"back to the model that wrote it, or take over what fits: zmqtrain export "
                f"{self._logdir} --to weights.safetensors, then Job(initial='weights.safetensors', "
                "initial_strict=False) in a new logdir"
            )

    def _log_changes(self, manifest: Manifest) -> None:
        """Log in one line how the job differs from the one that saved a checkpoint."""
        if manifest.global_step >= self._job.steps:
            log.warning(
                "the checkpoint is of step %d and the job ends at step %d, so there is nothing to "
                "train; give a larger --steps, or another --logdir",
                manifest.global_step,
                self._job.steps,
            )
        changes = changes_since(manifest.fingerprint, self.fingerprint)
        policy = make_policy(self._job.policy).spec
        if manifest.policy not in (policy, manifest.fingerprint.get("policy")):
            log.warning(
                "the policy is %s, with which the job was started; when the checkpoint was saved "
                "it was %s; zmqtrain policy changes it again",
                policy,
                manifest.policy,
            )
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


@contextlib.contextmanager
def _removed_on(directory: Path, error: type[BaseException]) -> Iterator[None]:
    """Remove a directory if the block raises such an error."""
    try:
        yield
    except error:
        shutil.rmtree(directory, ignore_errors=True)
        raise
