"""Where a ps keeps its shard: in a segment that outlives its process, if that is wanted and can be.

A segment that a killed ps left is taken over if it is of the same job, holds parameters, and is not
so old that every other task has given that ps up.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack

from zmqtrain.compute.device import make_device
from zmqtrain.errors import ExitCode, SegmentError, ZmqTrainError
from zmqtrain.server.receiver import MESSAGES_NBYTES
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_files import SHARED_MEMORY, default_directory, file_name
from zmqtrain.store.segment_layout import ALIVE_AT, GENERATION, JOB, VERSION, SegmentLayout
from zmqtrain.store.shard import Shard

if TYPE_CHECKING:
    from zmqtrain.server.server import ParameterServer

log = logging.getLogger(__name__)


def open_segment(ps: ParameterServer, layout: SegmentLayout, address: str) -> tuple[Segment, bool]:
    """Return a ps's memory, and whether it holds what a killed ps left.

    Raises:
        SegmentError: it cannot be a file, though that was asked for.
    """
    config = ps.config
    if config.lane == "memory" or (config.lane == "tcp" and not ps.is_crash_safe):
        return Segment.private(layout), False
    try:
        directory = Path(config.segment_dir) if config.segment_dir else default_directory()
        if directory is None:
            raise SegmentError(f"this host has no {SHARED_MEMORY}")
        path = directory / file_name(str(ps.task), address)
        left = _adopt(ps, layout, path) if ps.is_crash_safe else None
        segment = left or Segment.create(layout, path)
    except SegmentError as error:
        if config.lane == "shm" or config.segment_dir:
            raise
        log.warning(
            "%s; workers of this host will send their tensors by tcp, and a killed ps will go back "
            "to the last checkpoint: give --segment-dir, or make room (docker: --shm-size)",
            error,
        )
        return Segment.private(layout), False
    segment.words[JOB] = _digest(ps)
    note_alive(segment)
    return segment, left is not None


def make_shard(ps: ParameterServer, layout: ShardLayout, segment: Segment) -> Shard:
    """Return the shard that lies in a segment, updated by NumPy for now or by a GPU.

    Raises:
        ConfigError: there is no GPU.
    """
    update = ps.job.update()
    if ps.job.ps_device == "gpu":
        return Shard(layout, update, segment, device=make_device("gpu", "--ps-device"))
    safe = ps.is_crash_safe and segment.path is not None
    update = replace(update, fused=False)
    return Shard(layout, update, segment, safe=safe, threads=ps.config.threads)


def close_or_keep(ps: ParameterServer, segment: Segment, error: BaseException | None) -> None:
    """Leave the segment for the next life of a ps that ends, with ``error`` if that is why.

    It is removed if there can be no such life, or nothing for it to go on with.
    """
    given_up = isinstance(error, ZmqTrainError) and error.exit_code != ExitCode.PEER_LOST
    is_over = error is None and ps.shutdown is not None
    is_wanted = ps.is_crash_safe and ps.initialised and segment.path is not None
    if is_over or given_up or not is_wanted:
        segment.remove()
    else:
        log.info("its next life will find its memory in %s; or zmqtrain clean", segment.path)
        segment.close()


def note_alive(segment: Segment) -> None:
    """Write down that the ps lives."""
    segment.words[ALIVE_AT] = _boot_time_ms()


def tell_of_memory(ps: ParameterServer, address: str) -> None:
    """Print what the shard will need at most."""
    layout, segment = ps.shard.layout, ps.shard.segment
    log.info(
        "listening at %s: %d slices, %.1f MB of parameters; with %d workers its memory is at "
        "most %.1f MB%s and %.1f MB for messages",
        address,
        len(layout.slices),
        layout.nbytes / 1e6,
        ps.workers,
        segment.layout.nbytes(ps.workers) / 1e6,
        f" in {segment.path}" if segment.path else "",
        ps.workers * MESSAGES_NBYTES / 1e6,
    )
    ps.metrics.parameter_bytes.set(layout.nbytes)


def _adopt(ps: ParameterServer, layout: SegmentLayout, path: Path) -> Segment | None:
    """Return the segment of a killed life of this ps; one that nobody needs any more is removed."""
    segment = Segment.adopt(layout, path)
    if segment is None:
        return None
    age_s = (_boot_time_ms() - segment.words[ALIVE_AT]) / 1000
    limit_s = ps.timing.peer_timeout_s
    if segment.words[JOB] != _digest(ps):
        reason = "it is of another job"
    elif not segment.words[GENERATION]:
        reason = "it holds no parameters"
    elif not 0 <= age_s < limit_s:
        reason = f"its ps died {age_s:.0f} s ago, and after {limit_s:g} s nobody waits for it"
    else:
        return segment
    log.info("leaving version %d in %s: %s", segment.words[VERSION], path, reason)
    segment.remove()
    return None


def _digest(ps: ParameterServer) -> int:
    """Return a number of the job and of how it is cut, the same for every life of this ps."""
    known = msgpack.packb((sorted(ps.fingerprint.items()), ps.shards, ps.task.index))
    return int.from_bytes(hashlib.blake2b(known, digest_size=7).digest(), "big")


def _boot_time_ms() -> int:
    """Return milliseconds since the host was started, which every process of it sees alike."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
