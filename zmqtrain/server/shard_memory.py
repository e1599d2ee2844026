"""The memory of a ps's shard: a segment that outlives its process, if wanted and possible.

A ps takes over the segment of a killed one if it is of the same job, holds parameters, and is so
recent that other tasks still wait for that ps.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgpack

from zmqtrain.compute.device import make_device
from zmqtrain.config.options import names_of
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ExitCode, SegmentError, ZmqTrainError
from zmqtrain.job import Job
from zmqtrain.planning.plan import Plan
from zmqtrain.store.holdings.tables import Tables
from zmqtrain.store.layout import ITEM_NBYTES, ShardLayout
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_files import SHARED_MEMORY, can_be_shared, file_name, tables_directory
from zmqtrain.store.segment_layout import ALIVE_AT, GENERATION, JOB, VERSION, SegmentLayout
from zmqtrain.store.shard import Shard, segment_layout
from zmqtrain.store.table_memory import TableMemory
from zmqtrain.units import counted, data_size
from zmqtrain.wire.chunks import MESSAGES_NBYTES

log = logging.getLogger(__name__)


def open_shard(
    config: TaskConfig, plan: Plan, address: str, fingerprint: Mapping[str, str]
) -> tuple[Shard, bool]:
    """Return the shard of the ps at ``address``, and whether a killed one has left it.

    The CPU updates it, or a GPU; then it does not survive its process.

    Raises:
        ConfigError: there is no GPU.
        SegmentError: its memory cannot be a file, although that was requested.
    """
    job, update, layout = plan.job, plan.job.update(), plan.layouts[config.index]
    device = make_device("gpu", "--ps-device") if job.ps_device == "gpu" else None
    safe = config.crash_safe and device is None
    open_again = partial(
        open_segment,
        segment_layout(layout, update),
        address,
        config,
        safe=safe,
        digest=_digest(fingerprint, plan.shards, config.index, plan.group),
        is_board=plan.exchange.is_board,
    )
    segment, is_left = open_again()
    memory: TableMemory | None = None
    with ExitStack() as failed:
        failed.callback(lambda: close_or_remove(segment, memory, keep=is_left))
        memory = _open_tables(job, segment, is_left=is_left)
        if memory is None and is_left and job.table_variables():
            log.info("discarding %s: its tables are missing, or of another job", segment.path)
            segment.remove()
            segment, is_left = open_again()
            memory = _open_tables(job, segment, is_left=is_left)
        safe = safe and segment.path is not None
        tables = None
        if memory is not None:
            place = plan.row_place(layout.shard)
            ahead = plan.most_workers if plan.exchange.is_board else 0
            tables = Tables(job.table_updates(), memory, place, ahead=ahead)
        shard = Shard(
            layout,
            update,
            segment,
            safe=safe,
            threads=config.threads if device is None else 1,
            device=device,
            batch_size=job.worker_batch_size,
            tables=tables,
        )
        failed.pop_all()
    _log_memory(shard, address, plan)
    return shard, is_left


def _open_tables(job: Job, segment: Segment, *, is_left: bool) -> TableMemory | None:
    """Return the memory of the tables beside a segment; None: there are none, or none are left."""
    layouts = job.table_layouts()
    if not layouts:
        return None
    if segment.path is None:
        return TableMemory.private(layouts)
    directory = tables_directory(segment.path)
    if is_left:
        return TableMemory.adopt(layouts, directory)
    return TableMemory.create(layouts, directory)


def open_segment(
    layout: SegmentLayout,
    address: str,
    config: TaskConfig,
    *,
    safe: bool,
    digest: int,
    is_board: bool,
) -> tuple[Segment, bool]:
    """Return the memory of the ps at ``address``, and whether a killed one has left it.

    ``safe``: whether it survives the process. ``digest``: digest of the job and its partitioning.
    ``is_board``: whether workers exchange gradients in it.

    Raises:
        SegmentError: it cannot be a file, although that was requested.
    """
    if config.lane == "memory" or (config.lane == "tcp" and not safe):
        return Segment.private(layout), False
    try:
        directory = config.segment_directory
        if directory is None:
            raise SegmentError(f"this host has no {SHARED_MEMORY}")
        path = directory / file_name(str(config.task), address)
        left = _adopt(layout, path, digest, config.peer_timeout_s) if safe else None
        segment = left or Segment.create(layout, path)
    except SegmentError as error:
        if config.lane == "shm" or config.segment_dir:
            raise
        if is_board:
            remedy = f"or do without shared memory: {names_of('exchange', 'direct')}"
            raise SegmentError(f"{error}; {remedy}") from error
        remedy = ": give --segment-dir, or make room (docker: --shm-size)"
        log.warning(
            "%s; workers of this host will send their tensors by tcp, and a killed ps will go back "
            "to the last checkpoint%s",
            error,
            remedy if can_be_shared() else "",
        )
        return Segment.private(layout), False
    segment.words[JOB] = digest
    note_alive(segment)
    return segment, left is not None


def may_go_on(error: BaseException | None, *, is_over: bool) -> bool:
    """Return whether the next life of a ps may use the memory of one that ended.

    ``error``: why it ended, None without failure. ``is_over``: the chief has ended the run.
    """
    given_up = isinstance(error, ZmqTrainError) and error.exit_code != ExitCode.PEER_LOST
    return not given_up and not (error is None and is_over)


def close_or_remove(segment: Segment, memory: TableMemory | None = None, *, keep: bool) -> None:
    """Close a shard's memory, and its tables; keep the files for the next life, or remove them."""
    keep = keep and segment.path is not None
    if keep:
        text = "memory kept in %s for this ps's next life; zmqtrain clean removes it"
        log.info(text, segment.path)
    for each in (segment,) if memory is None else (memory, segment):
        each.close() if keep else each.remove()


def note_alive(segment: Segment) -> None:
    """Write the current time into the segment: the ps is alive."""
    segment.words[ALIVE_AT] = _boot_time_ms()


def copies_nbytes(layout: ShardLayout, job: Job) -> int:
    """Return the most bytes of copies of its own part.

    One is for readers, one is kept for evaluations, or two with tables, and three are of
    differences as they are encoded: see differences.py.
    """
    owned = len(range(layout.size)[layout.owned])
    kept = 2 if job.table_variables() else 1
    copies = 1 + kept * (job.evaluate_every > 0) + 3 * job.encodes_answers
    return owned * ITEM_NBYTES * copies


def _log_memory(shard: Shard, address: str, plan: Plan) -> None:
    layout, segment, workers = shard.layout, shard.segment, plan.most_workers
    log.info(
        "listening at %s: %s of parameters; with %s its memory is at most %s%s, %s for messages, "
        "and %s for copies that are read%s",
        address,
        data_size(layout.nbytes),
        counted(workers, "worker"),
        data_size(segment.layout.nbytes(workers)),
        f" in {segment.path}" if segment.path else "",
        data_size(workers * MESSAGES_NBYTES),
        data_size(copies_nbytes(layout, plan.job)),
        "; rows of tables take more as they are trained" if shard.tables is not None else "",
    )


def _digest(fingerprint: Mapping[str, str], *numbers: int) -> int:
    """Return a digest of the job; ``numbers``: count of shards, this shard, group of workers."""
    known = msgpack.packb((sorted(fingerprint.items()), numbers))
    return int.from_bytes(hashlib.blake2b(known, digest_size=7).digest(), "big")


def _adopt(layout: SegmentLayout, path: Path, digest: int, limit_s: float) -> Segment | None:
    """Return the segment of a killed life of this ps; remove an unusable one."""
    segment = Segment.adopt(layout, path)
    if segment is None:
        return None
    age_s = (_boot_time_ms() - segment.words[ALIVE_AT]) / 1000
    if segment.words[JOB] != digest:
        reason = "it is of another job"
    elif not segment.words[GENERATION]:
        reason = "it holds no parameters"
    elif not 0 <= age_s < limit_s:
        reason = f"its ps died {age_s:.0f} s ago; no task waits longer than {limit_s:g} s for it"
    else:
        return segment
    log.info("discarding version %d in %s: %s", segment.words[VERSION], path, reason)
    segment.remove()
    return None


def _boot_time_ms() -> int:
    """Return milliseconds since the host's start, the same for all its processes."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS lacks the first
    return time.clock_gettime_ns(clock) // 1_000_000
