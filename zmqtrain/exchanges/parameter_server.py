"""The exchange with parameter servers: gradients are pushed, the answer brings new parameters.

A step is one round trip to every ps. The answer of the leader also has the next batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import numpy as np

from zmqtrain.actors.joining import join_all
from zmqtrain.actors.link import Link
from zmqtrain.actors.outstanding import Outstanding
from zmqtrain.actors.task import JobActor
from zmqtrain.compute.arrays import Flat, zeros
from zmqtrain.errors import CheckpointError
from zmqtrain.exchanges.lanes import Lane, open_lanes
from zmqtrain.exchanges.overlap import Overlap
from zmqtrain.exchanges.reads import copy_consistently, read_parameters
from zmqtrain.exchanges.rows import ShardRows, by_shard
from zmqtrain.models.tables import RowsOf
from zmqtrain.store.segment_layout import IN_FORCE
from zmqtrain.training.exchange import Exchange, Membership, Round, StepReport, StepResult
from zmqtrain.wire.codec import Envelope
from zmqtrain.wire.compression import make_compression
from zmqtrain.wire.messages import Leave, Pull, PullReply, Push, PushReply

Reply = TypeVar("Reply", PullReply, PushReply)


class ParameterServerExchange(Exchange):
    """One worker's exchange with every ps of its cluster."""

    def __init__(self, actor: JobActor, links: Sequence[Link]) -> None:
        """``actor``: the worker's task. ``links``: one to each ps, the leader's first."""
        self._actor, self._links = actor, links
        self.lanes: list[Lane] = []
        # By shard: parameters that are carried byte by byte, if other tasks change them.
        self._byte_state: dict[int, Flat] = {}
        self.versions = [0] * len(links)  # of these
        self._generations = [0] * len(links)  # of these
        self._sequence = 0  # of the step under way, 0 before the first
        self._overlap: Overlap | None = None
        self._in_rounds = False  # or it sends gradients
        self._has_tables = bool(actor.job.table_variables())
        self.rows: ShardRows | None = None  # of this membership, if there are tables
        self.is_finished = False  # all shards have answered, and the job needs no more

    async def join(self) -> Membership:
        """Begin a new life at every ps, agree on lanes, and pull.

        Raises:
            RefusedError, PeerLostError, ConfigError: some ps, or the lane to it, is not to be had.
        """
        self.is_finished, self._sequence, self.lanes = False, 0, []
        self.lanes = await open_lanes(self._actor, await join_all(self._actor, self._links))
        own = {shard: lane.layout for shard, lane in enumerate(self.lanes) if not lane.is_shared}
        rests = {shard: layout.size - layout.averaged for shard, layout in own.items()}
        self._byte_state = {
            shard: zeros(rest) for shard, rest in rests.items() if any(rests.values())
        }
        if self._actor.job.overlap:
            self._overlap = Overlap(self.lanes, self._actor.crash)
        if self._has_tables:
            readers = [lane.rows for lane in self.lanes]
            job, copies = self._actor.job, self._actor.plan.copies
            compression = make_compression(job.compression)
            self.rows = ShardRows(
                job.table_variables(), self._links, readers, copies, compression=compression
            )
        reply = await self._answer(self._pull(), PullReply)
        return Membership(
            layouts=[*own.values()],
            parameters=[self.lanes[shard].source for shard in own],
            gradients=[self.lanes[shard].gradient for shard in own],
            batches=reply.batches,
            stop=reply.stop,
            byte_state=[*self._byte_state.values()],
            rows=self.rows,
            round=self._begin_round(reply),
        )

    def begin(self) -> None:
        self._sequence += 1
        if self._overlap is not None:
            self._overlap.begin(self._sequence)

    def written(self, names: Sequence[str]) -> None:
        if self._overlap is not None:
            self._overlap.written(names)

    def finish(self, report: StepReport) -> Awaitable[StepResult]:
        reason = f"it has not answered push {self._sequence}"
        requests: list[Outstanding] = []
        given, shards = report.rows if report.finite else (), len(self._links)
        rows = by_shard(given, shards, self._actor.plan.copies)
        for shard, (lane, of_tables) in enumerate(zip(self.lanes, rows, strict=True)):
            push = self._push_of(shard, report, of_tables)
            if lane.compressor is not None:
                runs = (run for run in lane.layout.runs if run[0].variable.name in report.absent)
                lane.compressor.hold([slice(start, stop) for _, start, stop in runs])
            request = None
            if self._overlap is not None:
                request = self._overlap.complete(shard, push, of_tables)
            if request is None:
                chunks, tensors = lane.split(self._sequence) if push.finite else (None, ())
                parts = lane.with_rows(chunks, of_tables, self._sequence)
                request = lane.link.begin(
                    push,
                    tensors=tensors,
                    chunks=parts,
                    out=lane.out,
                    add=lane.add,
                    sequence=self._sequence,
                    reason=reason,
                )
            requests.append(request)
        if self.rows is not None:
            self.rows.ask(report.ahead, self._sequence)
        return self._result(requests)

    def _push_of(self, shard: int, report: StepReport, rows: Sequence[RowsOf]) -> Push:
        """Return the message of a gradient; ``rows``: those of tables that the shard gets."""
        lane = self.lanes[shard]
        return Push(
            sequence=self._sequence,
            version=self.versions[shard],
            batch=report.batch,
            examples=report.examples,
            loss=report.loss,
            finite=report.finite,
            sums={} if shard else report.sums,
            wants_parameters=lane.out is not None,
            absent=lane.layout.numbers_of(report.absent),
            weight=report.weight,
            rows=self._counts(rows),
            batches=report.batches,
        )

    def _counts(self, rows: Sequence[RowsOf]) -> tuple[int, ...]:
        """Return how many of the rows are of each table; () if there are none."""
        if not rows:
            return ()
        counts = {each.table: len(each.ids) for each in rows}
        return tuple(counts.get(t.number, 0) for t in self._actor.job.table_variables())

    async def wait_for_end(self) -> None:
        """Wait for the chief to end the run, until the task is stopped.

        Raises:
            FencedError: some ps has a new life, and may need this worker again.
            PeerLostError: some ps is given up.
        """
        self.is_finished = True
        reason = "the job is complete; the chief has not ended it yet"
        with self._actor.waits.on(self._links[0].peer, reason):
            while True:
                await asyncio.sleep(self._actor.timing.heartbeat_s)
                for link in self._links:
                    link.check()

    def leave(self, reason: str) -> None:
        for link in self._links:
            if link.joined:
                link.send(Leave(reason))

    def _pull(self) -> list[Outstanding]:
        names = ",".join(lane.name for lane in self.lanes)
        reason = "it has not sent the first parameters yet"
        return [
            lane.link.begin(Pull(names, lane.out is not None), out=lane.out, reason=reason)
            for lane in self.lanes
        ]

    async def _result(self, requests: Sequence[Outstanding]) -> StepResult:
        reply = await self._answer(requests, PushReply)
        return StepResult(
            result=reply.result,
            batches=reply.batches,
            stop=reply.stop,
            reason=reply.reason,
            held_s=reply.held_s,
            round=self._begin_round(reply),
            step=reply.version if all(each.has_parameters for each in requests) else None,
            sequence=reply.sequence,
        )

    def _begin_round(self, reply: PullReply | PushReply) -> Round | None:
        """Return the round that an answer begins, None if it asks for a gradient.

        Where rounds follow gradients, or the other way round, compressors forget what they owe.
        """
        steps = reply.local_steps
        if (steps > 0) != self._in_rounds:
            self._in_rounds = steps > 0
            for lane in self.lanes:
                if lane.compressor is not None:  # feedback of gradients has another unit
                    lane.compressor.forget()
        if not steps:
            return None
        return Round(reply.version, steps, reply.learning_rate, reply.sends_difference)

    async def _answer(self, requests: Sequence[Outstanding], kind: type[Reply]) -> Reply:
        """Wait until all shards let this worker go on; take in parameters; return ps 0's answer."""
        try:
            if len(requests) == 1:  # which costs less
                replies = [await requests[0].future]
            else:  # a refusal by one shard counts at once: others may be waiting for that shard
                replies = await asyncio.gather(*(request.future for request in requests))
        finally:
            for link, request in zip(self._links, requests, strict=True):
                link.end(request)
        for shard, reply in enumerate(replies):
            self._take_in(shard, reply, reply.expect(kind).version)
        if self._actor.job.consistent_reads:  # on tcp they are copies anyway
            for lane in self.lanes:
                if (reached := lane.reached) is not None:
                    await read_parameters(lane.link, reached, lane.layout, lane.source, copies=True)
        for shard, state in self._byte_state.items():
            await self._read_byte_state(shard, state)
        return replies[0].expect(kind)

    def copy_byte_state(self) -> None:
        """Copy the state that is carried byte by byte, which does not change now."""
        for shard, state in self._byte_state.items():
            source = self.lanes[shard].source
            np.copyto(state, source[len(source) - len(state) :])

    async def _read_byte_state(self, shard: int, state: Flat) -> None:
        """Copy the state that is carried byte by byte: read while it changes, it would be torn."""
        lane = self.lanes[shard]
        source, reached = lane.source, lane.reached
        tail = slice(len(source) - len(state), None)
        # A copy; or a board's, which changes when this worker's next gradient is ready.
        if reached is None or self._actor.job.consistent_reads or reached.board[IN_FORCE]:
            np.copyto(state, source[tail])
        elif not copy_consistently(reached.words, source[tail], state):
            whole = zeros(len(source))
            await read_parameters(lane.link, reached, lane.layout, whole, copies=True)
            np.copyto(state, whole[tail])

    def _take_in(self, shard: int, reply: Envelope, version: int) -> None:
        before = self.versions[shard]
        if version < before and reply.generation == self._generations[shard]:
            raise CheckpointError(
                f"{reply.sender} went back from version {before} to {version}: both it and the "
                "chief were restarted, and no checkpoint holds what was learned; give the job a "
                "logdir (--logdir DIR)"
            )
        self._generations[shard] = reply.generation
        self.versions[shard] = version
        self._actor.generation = max(self._actor.generation, reply.generation)
