"""Receives the requests of workers: checks them, detects duplicates, stages gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.errors import FencedError, ProtocolError, RefusedError
from zmqtrain.models.weights import EMPTY, LIMIT, weight_of
from zmqtrain.server.executor import Executor
from zmqtrain.server.rows import RowAccess
from zmqtrain.server.state import Pending, ShardState, WorkerRecord
from zmqtrain.store.segment_layout import COUNT_LIMIT, NAMES_NBYTES, SUMS, has_room
from zmqtrain.wire import chunks
from zmqtrain.wire.compression import Decompressor, make_compression
from zmqtrain.wire.messages import Chunk, ChunksReceived, Pull, PullReply, Push, PushReply, RowChunk

log = logging.getLogger(__name__)

EXAMPLES_LIMIT = 1 << 31  # of one push; sums of them fit in 64 bits


class Receiver:
    """Checks the pulls and pushes of workers, and stages their gradients in the segment."""

    def __init__(
        self,
        actor: JobActor,
        state: ShardState,
        peers: PeerTable,
        executor: Executor,
        rows: RowAccess,
        holds_lease: Callable[[int, int, int], bool] | None,
    ) -> None:
        """``holds_lease``: whether a worker holds a lease on a batch, and on how many from it on.

        It is None if that is not known here.
        """
        self._state = state
        self._peers = peers
        self._executor = executor
        self._rows = rows
        self._metrics = actor.metrics
        self._holds_lease = holds_lease
        trained = state.shard.layout.trained
        self._decode = Decompressor(make_compression(actor.job.compression), trained).decode

    def take_in(self, request: Request, message: Pull | Push) -> WorkerRecord | None:
        """Enter a worker's request; return None if it is repeated or lacks chunks."""
        if isinstance(message, Pull):
            return self._take_pull(request, message)
        return self._take_push(request, message)

    def _take_pull(self, request: Request, pull: Pull) -> WorkerRecord | None:
        peer = self._peers.member(request)
        worker = self._state.workers[peer.index]
        if worker.has_pulled:
            self._answer_again(worker, request, 0)
            return None
        self._state.assign_buffer(worker)
        peer.lanes = pull.lanes
        self._metrics.pulls.inc()
        return self._enter(worker, Pending(pull, request))

    def _take_push(self, request: Request, push: Push) -> WorkerRecord | None:
        try:
            worker = self._worker(request)
        except FencedError:
            self._metrics.pushes.fenced.inc()
            raise
        if 0 < push.sequence <= worker.received:
            self._state.duplicates += 1
            self._metrics.pushes.duplicate.inc()
            self._answer_again(worker, request, push.sequence)
            return None
        self._check_push(request, push, worker)
        if not self._complete(request, push, worker):
            return None
        self._state.shard.segment.note_absent(worker.buffer, push.absent)
        self._state.shard.stage(worker.index, worker.buffer, push.sequence, weight_of(push))
        pending = Pending(push, request)
        if not push.finite:
            pending.result = "refused"
            pending.reason = "the loss or the gradient is NaN or infinite"
            self._metrics.nonfinite_gradients.inc()
            self._metrics.pushes.refused.inc()
        return self._enter(worker, pending)

    def on_chunk(self, request: Request, chunk: Chunk | RowChunk) -> None:
        """Take in a chunk of a gradient."""
        worker = self._worker(request)
        tensors = request.envelope.tensors
        if chunk.sequence > worker.received:  # else of a push that was sent twice
            self._check_turn(request, chunk.sequence, worker)
            if worker.lane != "tcp" or worker.buffer < 0:
                raise ProtocolError(f"a chunk of push {chunk.sequence} on lane {worker.lane}")
            if isinstance(chunk, Chunk):
                flat = self._state.shard.segment.gradient(worker.buffer)
                start = chunk.index * chunks.CHUNK_SIZE
                self._decode(start, tensors, chunks.at(flat, chunk.index))
                worker.chunks.add(chunk.index)
            else:
                self._rows.take_in(chunk, tensors, worker)
        worker.unacknowledged_nbytes += sum(tensor.nbytes for tensor in tensors)
        if 2 * worker.unacknowledged_nbytes >= chunks.WINDOW_NBYTES:
            request.reply(ChunksReceived(worker.unacknowledged_nbytes))
            worker.unacknowledged_nbytes = 0

    def _worker(self, request: Request) -> WorkerRecord:
        return self._state.workers[self._peers.member(request).index]

    def _enter(self, worker: WorkerRecord, pending: Pending) -> WorkerRecord:
        worker.pending, worker.reply = pending, None
        self._state.keep(worker)
        return worker

    def _answer_again(self, worker: WorkerRecord, request: Request, sequence: int) -> None:
        """Answer a repeated push, or pull (0), as before, without another effect."""
        pending, reply = worker.pending, worker.reply
        if pending is not None and pending.sequence == sequence:
            pending.request = request
        elif reply is not None and worker.answered == sequence:
            self._executor.after_orders(partial(self._reply_again, request, reply))
        else:
            what = f"push {sequence}" if sequence else "the pull"
            raise RefusedError(
                f"{what} of {worker} was answered long ago; expected push {worker.received} again, "
                "or the next one; if two processes have the same --index, end one of them"
            )

    def _reply_again(self, request: Request, reply: PullReply | PushReply) -> None:
        now = replace(reply, version=self._state.version)
        self._executor.send_parameters(request, now)

    def _check_turn(self, request: Request, sequence: int, worker: WorkerRecord) -> None:
        state, generation = self._state, request.envelope.generation
        if generation > state.generation:  # which the chief has not begun here yet
            raise FencedError(f"{state.task} is still in generation {state.generation}")
        if generation < state.generation:
            raise RefusedError(
                f"push of generation {generation}, the job is in generation {state.generation}"
            )
        if not state.initialised:
            raise RefusedError(f"{state.task} holds no parameters yet, so a push has no base")
        if sequence != worker.received + 1:
            raise ProtocolError(f"push {sequence} of {worker} follows push {worker.received}")
        if worker.pending is not None:
            before = worker.received or "its pull"
            raise ProtocolError(f"push {sequence} of {worker} came before {before} was answered")

    def _check_push(self, request: Request, push: Push, worker: WorkerRecord) -> None:
        self._check_turn(request, push.sequence, worker)
        if worker.buffer < 0:
            raise ProtocolError(f"push {push.sequence} of {worker} came without a pull before it")
        if not 1 <= push.examples < EXAMPLES_LIMIT:
            raise ProtocolError(
                f"a push of {push.examples} examples, expected 1 to {EXAMPLES_LIMIT - 1}"
            )
        if not EMPTY <= weight_of(push) < LIMIT:
            raise ProtocolError(f"a push of weight {push.weight!r}, expected up to {LIMIT:.0e}")
        if not 0 <= push.version < COUNT_LIMIT or not 0 <= push.batch < COUNT_LIMIT:
            raise ProtocolError(f"a push of batch {push.batch} on version {push.version}")
        if not has_room(push.sums):
            raise ProtocolError(
                f"a push of {len(push.sums)} sums named {', '.join(push.sums)!r:.80}, expected at "
                f"most {SUMS}, with printable names of {NAMES_NBYTES} bytes in all"
            )
        if len(push.rows) not in (0, len(self._rows.tables)) or min(push.rows, default=0) < 0:
            raise ProtocolError(f"a push of {push.rows} rows in {len(self._rows.tables)} tables")
        variables = len(self._state.shard.layout.numbers)
        if unknown := set(push.absent).difference(range(variables)):
            raise ProtocolError(
                f"a push lacks variable {min(unknown)}, expected 0 to {variables - 1}"
            )
        if push.batches < 1:
            raise ProtocolError(f"a push of {push.batches} batches, expected 1 or more")
        lease = worker.index, push.batch, push.batches
        if self._holds_lease is not None and not self._holds_lease(*lease):
            more = f" and {push.batches - 1} others" if push.batches > 1 else ""
            raise ProtocolError(
                f"{worker} pushes batch {push.batch}{more}, which it has no lease on"
            )

    def _complete(self, request: Request, push: Push, worker: WorkerRecord) -> bool:
        """Complete the gradient in the worker's buffer in the segment.

        Return False if chunks were lost. Then the push counts as lost, too; the answer to the
        worker's next heartbeat makes it send both again.
        """
        segment, tensors = self._state.shard.segment, request.envelope.tensors
        rides, in_chunks, came = False, 0, len(worker.chunks)
        if push.finite and worker.lane == "tcp":
            in_chunks = chunks.count(segment.layout.size)
            rides = in_chunks <= 1
            in_chunks = 0 if rides else in_chunks
        if came < in_chunks and not tensors:
            log.info("push %d of %s has %d of %d chunks", push.sequence, worker, came, in_chunks)
            return False
        if bool(tensors) != rides or (push.finite and came != in_chunks):
            raise ProtocolError(
                f"a push of {len(tensors)} tensors after {came} chunks, expected "
                f"{'some' if rides else 'none'} after {in_chunks}"
            )
        if not self._rows.complete(push, worker):
            log.info("push %d of %s lacks rows", push.sequence, worker)
            return False
        worker.chunks.clear()
        if rides:
            self._decode(0, tensors, segment.gradient(worker.buffer))
        return True
