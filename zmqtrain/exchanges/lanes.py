"""Lanes: the ways of tensors between a ps and the tasks that connect to it, agreed at join.

memory, shm: the task has reached the ps's segment. It reads parameters where they lie and writes
its gradient where the ps takes it from; messages carry no tensors. tcp: tensors travel as chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from zmqtrain.actors.joining import Admission
from zmqtrain.actors.link import Link
from zmqtrain.compute.arrays import Flat, zeros
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError, FencedError, RefusedError, SegmentError
from zmqtrain.models.tables import RowsOf
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.placement import nearest
from zmqtrain.store.row_buffer import RowBuffer
from zmqtrain.store.segment import Reached, reach
from zmqtrain.store.shard import segment_layout
from zmqtrain.store.table_memory import TableMemory
from zmqtrain.store.table_memory import reach as reach_tables
from zmqtrain.wire import chunks
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.chunks import Add, Chunks, Encode
from zmqtrain.wire.compression import Compressor, Decompressor, make_compression
from zmqtrain.wire.messages import Mapped, MapSegment
from zmqtrain.wire.rows import chunks_of

if TYPE_CHECKING:
    from zmqtrain.actors.task import JobActor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lane:
    """One task's lane to one ps.

    ``parameters`` and ``gradient`` are float32 of shape (size,). On memory and shm they are the
    ps's own, and ``reached`` is its segment; on tcp they are copies that the chunks are of, or, if
    it ``is_shared``, those of another lane. ``source``: where the task reads the parameters: in
    place, or a copy. ``layout``: copies are those slices that the task reads elsewhere. ``rows`` of
    the ps's tables are read there, and those of a gradient are written to ``row_buffer``; None:
    both travel, or there are no tables.
    """

    link: Link
    name: str
    layout: ShardLayout
    parameters: Flat
    source: Flat
    gradient: Flat
    reached: Reached | None = None
    compressor: Compressor | None = None  # of gradients that travel
    add: Add | None = None  # adds a compressed difference to parameters that travel
    is_shared: bool = False
    rows: TableMemory | None = None
    row_buffer: RowBuffer | None = None

    def split(self, sequence: int) -> tuple[Chunks | None, tuple[Tensor, ...]]:
        """Return the chunks of the gradient for a push, or the tensors inline in it."""
        if self.reached is not None:
            return None, ()
        return chunks.split(self.gradient, sequence, self._encode)

    def chunks_to_come(self, sequence: int) -> Chunks | None:
        """Return the chunks of a gradient that is still being computed, none of them ready yet."""
        if self.reached is not None or chunks.count(len(self.gradient)) == 1:
            return None
        return Chunks(self.gradient, sequence, self._encode, in_order=False)

    def with_rows(
        self, parts: Chunks | None, rows: Sequence[RowsOf], sequence: int
    ) -> Chunks | None:
        """Write the rows of a push to memory that its ps reads, or add them to the parts of it."""
        if self.row_buffer is not None:
            self.row_buffer.write(rows)
        if self.row_buffer is not None or not rows:
            return parts
        compression = None if self.compressor is None else self.compressor.compression
        parts = Chunks(None, sequence, self._encode) if parts is None else parts
        parts.end_with(chunks_of(rows, sequence, compression))
        return parts

    @property
    def _encode(self) -> Encode:
        return chunks.as_it_is if self.compressor is None else self.compressor.encode

    @property
    def out(self) -> Flat | None:
        """The array that receives parameters from the ps; None: the lane transfers none."""
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
    return [
        lane
        if lane.reached is not None
        else replace(shared, link=lane.link, layout=lane.layout, source=one.parameters)
        for lane in lanes
    ]


async def _open_lane(actor: JobActor, layout: ShardLayout, joined: Admission) -> Lane:
    reached = await map_segment(actor, layout.shard, joined)
    if reached is not None:
        segment, number, rows = reached
        is_copied = actor.job.consistent_reads
        try:
            return Lane(
                joined.link,
                segment.lane,
                layout,
                parameters=segment.parameters,
                source=zeros(layout.size) if is_copied else segment.parameters,
                gradient=segment.gradient(number),
                reached=segment,
                rows=rows,
                row_buffer=None if rows is None else rows.buffer(number),
            )
        except SegmentError as error:
            await _check_known(joined.link)  # the place may be another's since our lease ran out
            raise RefusedError(f"{joined.link.peer}: {error}") from error
    parameters, gradient = zeros(layout.size), zeros(layout.size)
    lane = Lane(joined.link, "tcp", layout, parameters, parameters, gradient)
    compression = make_compression(actor.job.compression)
    if compression is None:
        return lane
    compressor = Compressor(compression, layout.trained)
    return replace(lane, compressor=compressor, add=Decompressor(compression, layout.trained).add)


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
                proof = MapSegment(segment.lane, segment.nonce)
                reply = await link.request(proof, reason="it has not assigned a buffer yet")
                return Near(segment, reply.expect(Mapped).buffer, rows)
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


async def _check_known(link: Link) -> None:
    """Ask whether the ps is still the one that has welcomed us; raise FencedError if not."""
    await link.request(MapSegment("shm", nonce=""), reason="it may have been restarted")
