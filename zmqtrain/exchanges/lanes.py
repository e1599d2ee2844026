"""How tensors travel between a ps and the tasks that connect to it: agreed at join, by proof.

memory, shm: the task has reached the ps's segment. It reads parameters where they lie and writes
its gradient where the ps takes it from; messages carry no tensors. tcp: tensors travel as chunks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zmqtrain.actors.joining import Admission
from zmqtrain.actors.link import Link
from zmqtrain.compute.arrays import Flat, zeros
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError, FencedError, RefusedError, SegmentError
from zmqtrain.optim import AVERAGE
from zmqtrain.planning.plan import Plan
from zmqtrain.store.layout import ShardLayout, empty_values
from zmqtrain.store.placement import nearest
from zmqtrain.store.row_buffer import RowBuffer
from zmqtrain.store.segment import Reached, reach
from zmqtrain.store.segment_layout import CLOCK, VERSION
from zmqtrain.store.shard import segment_layout
from zmqtrain.store.table_memory import TableMemory
from zmqtrain.store.table_memory import reach as reach_tables
from zmqtrain.wire import chunks
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.chunks import Add, Chunks, Encode
from zmqtrain.wire.compression import Compressor, Decompressor, make_compression
from zmqtrain.wire.messages import Mapped, MapSegment, Parameters, Read

if TYPE_CHECKING:
    from zmqtrain.actors.task import JobActor

log = logging.getLogger(__name__)

_ATTEMPTS = 8
_YIELD = threading.Event()  # never set: waiting for it frees the core for the ps


@dataclass(frozen=True, slots=True)
class Lane:
    """One task's lane to one ps.

    ``parameters`` and ``gradient`` are float32 of shape (size,). On memory and shm they are the
    ps's own, and ``reached`` is its segment; on tcp they are copies that the chunks are of, or, if
    it ``is_shared``, those of another lane. ``layout``: copies are those slices that the task reads
    elsewhere. ``rows`` of the ps's tables are read there, and those of a gradient are written to
    ``row_buffer``; None: both travel, or there are no tables.
    """

    name: str
    layout: ShardLayout
    parameters: Flat
    gradient: Flat
    reached: Reached | None = None
    compressor: Compressor | None = None  # of gradients that travel
    add: Add | None = None  # adds a compressed difference to parameters that travel
    is_shared: bool = False
    rows: TableMemory | None = None
    row_buffer: RowBuffer | None = None

    def split(self, sequence: int) -> tuple[Chunks | None, tuple[Tensor, ...]]:
        """Return the chunks of the gradient for a push, or what is inline in it."""
        if self.reached is not None:
            return None, ()
        return chunks.split(self.gradient, sequence, self._encode)

    def chunks_to_come(self, sequence: int) -> Chunks | None:
        """Return the chunks of a gradient that is still being computed, none of them ready yet."""
        if self.reached is not None or chunks.count(len(self.gradient)) == 1:
            return None
        return Chunks(self.gradient, sequence, self._encode, in_order=False)

    @property
    def _encode(self) -> Encode:
        return chunks.as_it_is if self.compressor is None else self.compressor.encode

    @property
    def out(self) -> Flat | None:
        """Where parameters that travel are laid; None: none do."""
        owned = self.layout.owned
        return self.parameters[owned] if self.reached is None and owned.stop else None


async def open_lanes(actor: JobActor, joined: Sequence[Admission]) -> list[Lane]:
    """Agree with every ps on a lane for a worker.

    Raises:
        ConfigError: the lane that was asked for is not to be had.
        FencedError: a ps does not know us any more.
    """
    layouts = actor.plan.layouts
    lanes = [await _open_lane(actor, *each) for each in zip(layouts, joined, strict=True)]
    near = [shard for shard, lane in enumerate(lanes) if lane.reached is not None]
    seen = nearest(layouts, near)
    lanes = [replace(lane, layout=layout) for lane, layout in zip(lanes, seen, strict=True)]
    if not near or actor.plan.copies < len(lanes):
        return lanes
    one = lanes[near[0]]  # all ps hold the same, so the same bytes go to those that are far
    shared = replace(one, name="tcp", reached=None, is_shared=True, rows=None, row_buffer=None)
    return [replace(shared, layout=lane.layout) if lane.reached is None else lane for lane in lanes]


async def _open_lane(actor: JobActor, layout: ShardLayout, joined: Admission) -> Lane:
    reached = await map_segment(actor, layout.shard, joined)
    if reached is not None:
        segment, number, rows = reached
        try:
            own = segment.parameters, segment.gradient(number)
            row_buffer = None if rows is None else rows.buffer(number)
            return Lane(segment.lane, layout, *own, segment, rows=rows, row_buffer=row_buffer)
        except SegmentError as error:
            await _check_known(joined.link)  # the place may be another's since our lease ran out
            raise RefusedError(f"{joined.link.peer}: {error}") from error
    parameters, gradient = zeros(layout.size), zeros(layout.size)
    compression = make_compression(actor.job.compression)
    if compression is None:
        return Lane("tcp", layout, parameters, gradient)
    trained = layout.trained
    both_ways = Compressor(compression, trained), Decompressor(compression, trained).add
    return Lane("tcp", layout, parameters, gradient, None, *both_ways)


class Near(NamedTuple):
    """A ps's memory that this task has reached, and the number of its own gradient there."""

    segment: Reached
    number: int
    rows: TableMemory | None  # None: there are no tables


async def map_segment(actor: JobActor, shard: int, joined: Admission) -> Near | None:
    """Reach the ps's segment and its tables, if it is on this host.

    Raises:
        ConfigError: it cannot be reached, though the lane that was asked for needs that.
        FencedError: the ps has a new life, and another segment.
    """
    wanted, link = actor.lane, joined.link
    reason = "that is the lane asked for"
    if wanted != "tcp":
        layout = actor.plan.layouts[shard]
        try:
            welcome, job = joined.welcome, actor.job
            segment = reach(welcome.segment, segment_layout(layout, job.update()))
            tables = job.table_layouts()
            place, is_board = welcome.tables, actor.plan.exchange.is_board
            rows = reach_tables(place, tables, writable=is_board) if tables else None
            if wanted in ("auto", segment.lane):
                return Near(segment, await _prove(link, segment), rows)
            reason = f"its lane is {segment.lane}"
        except FencedError:
            raise
        except (SegmentError, RefusedError) as error:
            reason = str(error)
    if wanted in ("memory", "shm"):
        await _check_known(link)
        raise ConfigError(
            f"{names_of('lane')} is {wanted}, but {link.peer} cannot be reached so: {reason}; "
            "run both on one host (and memory: in one process) with the same --lane, or use auto"
        )
    log.info("tensors travel to %s by tcp: %s", link.peer, reason)
    return None


async def _prove(link: Link, segment: Reached) -> int:
    reply = await link.request(
        MapSegment(segment.lane, segment.nonce), reason="it has not assigned a buffer yet"
    )
    return reply.expect(Mapped).buffer


async def _check_known(link: Link) -> None:
    """Ask whether the ps is still the one that has welcomed us; raise FencedError if not."""
    await link.request(MapSegment("shm", nonce=""), reason="it may have been restarted")


async def read_variables(
    plan: Plan,
    links: Sequence[Link],
    segments: Sequence[Reached | None],
    *,
    average: bool = False,
    at: int = 0,
) -> tuple[dict[str, Any], list[int]]:
    """Return all variables, or their moving averages, and the version of each shard.

    ``at``: what the shards have kept of this one.
    """
    layouts, job = plan.layouts, plan.job
    flats = [zeros(layout.size) for layout in layouts]
    reading = (
        read_parameters(*each, average=average, at=at)
        for each in zip(links, segments, layouts, flats, strict=True)
    )
    versions = await asyncio.gather(*reading)
    values = empty_values(job.variables())
    for layout, flat in zip(layouts, flats, strict=True):
        layout.scatter(flat, values)
    return values | job.frozen(), versions


async def read_parameters(
    link: Link,
    segment: Reached | None,
    layout: ShardLayout,
    out: Flat,
    *,
    copies: bool = False,
    average: bool = False,
    at: int = 0,
) -> int:
    """Copy what a shard owns (or its moving average), as it is at one version; return the version.

    ``out``: of shape (layout.size,). ``copies``: copy all that it holds. ``at``: copy what it has
    kept of this version.
    """
    part = slice(None) if copies else layout.owned
    if segment is not None and not at:
        source = segment.slots[AVERAGE] if average else segment.parameters
        if copy_consistently(segment.words, source[part], out[part]):
            return segment.words[VERSION]
    message = Read(average, copies=copies, at=at)
    reply = await link.request(message, reason="its parameters are read", out=out[part])
    return reply.expect(Parameters).version


def copy_consistently(words: memoryview, source: Flat, out: Flat) -> bool:
    """Copy ``source`` while no update changes it; False if updates did in every attempt.

    A sequence lock: the ps makes the clock odd before an update and even after it. Loads and
    stores are taken to keep their order, as x86 does; elsewhere the copy itself takes far longer
    than a store may be late.
    """
    for _ in range(_ATTEMPTS):
        before = words[CLOCK]
        if before % 2 == 0:
            np.copyto(out, source)
            if words[CLOCK] == before:
                return True
        else:
            _YIELD.wait(0.0005)
    return False
