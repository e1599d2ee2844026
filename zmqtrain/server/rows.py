"""The rows of a ps's tables: those that are asked for, and those of a push that travel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zmqtrain.actors.actor import Request, ResendId
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.errors import ProtocolError, RefusedError, ZmqTrainError
from zmqtrain.models.tables import Ids, RowPlace, Rows, RowsOf, TableVariable, shards_of
from zmqtrain.server.executor import Executor
from zmqtrain.server.state import ShardState, WorkerRecord
from zmqtrain.store.finite import all_finite
from zmqtrain.units import data_size
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.compression import Compression
from zmqtrain.wire.messages import Lookup, Push, RowChunk, RowValues
from zmqtrain.wire.rows import check_size, decoded, encoded_rows, joined, rows_in

MAX_NBYTES = 1 << 30  # most bytes of rows in a push, all of it held in memory until it has come


class RowAccess:
    """Answers lookups between two orders, and takes in the rows of pushes."""

    def __init__(
        self,
        tables: Sequence[TableVariable],
        place: RowPlace,
        state: ShardState,
        peers: PeerTable,
        executor: Executor,
        compression: Compression | None = None,
    ) -> None:
        """``place``: which rows the shard holds. ``compression``: that of sent gradients."""
        self.tables, self._place, self._compression = tables, place, compression
        self._state, self._peers, self._executor = state, peers, executor
        self._asked: set[ResendId] = set()  # lookups that wait for earlier orders

    def on_lookup(self, request: Request, message: Lookup) -> None:
        peer = self._peers.member(request)
        if not self._state.initialised:
            raise RefusedError(f"{self._state.task} holds no parameters yet")
        ids = self._ids_in(request.envelope.tensors[:1], message)
        read, answer = partial(self._read, message, ids), partial(self._answer, request, message)
        worker = self._state.workers.get(peer.index) if peer.is_worker else None
        if worker is not None and message.after > worker.received + 1:
            raise ProtocolError(f"rows after push {message.after}, of {worker.received} received")
        if worker is not None and worker.owes(message.after) and not message.at:
            worker.lookups[request.envelope.request_id] = lambda: answer(read())
            return
        if request.resend_id in self._asked:
            return  # it was sent again before its turn came
        self._asked.add(request.resend_id)
        if message.at:  # rows that were forgotten meanwhile take time
            self._executor.beside_orders(read, answer)
        else:
            self._executor.after_orders(lambda: answer(read()))

    def _read(self, message: Lookup, ids: Sequence[Ids]) -> list[Rows]:
        """Return the rows that are asked for."""
        tables = self._state.shard.tables
        source = None if tables is None else tables.memory.read
        if message.at:
            kept = self._executor.kept(message.at)
            if kept is None or kept.rows is None:
                raise RefusedError(f"{self._state.task} has not kept version {message.at}")
            source = kept.rows.read
        if source is None:
            return []
        return [source(*each) for each in zip(message.tables, ids, strict=True)]

    def _answer(self, request: Request, message: Lookup, found: list[Rows] | ZmqTrainError) -> None:
        self._asked.discard(request.resend_id)
        if isinstance(found, ZmqTrainError):
            request.refuse(RefusedError(str(found)))
            return
        version = message.at or self._state.version
        compressed = message.compressed and all(all_finite(rows.reshape(-1)) for rows in found)
        tensors = encoded_rows(found, self._compression if compressed else None)
        request.reply(RowValues(version, compressed), tensors)

    def take_in(self, chunk: RowChunk, tensors: Sequence[Tensor], worker: WorkerRecord) -> None:
        """Take in some rows of a push.

        Raises:
            ProtocolError: they are not rows of this shard's tables, or too many.
        """
        ids = self._ids_in(tensors[:1], chunk)
        dims = [self.tables[table].dim for table in chunk.tables]
        rows = rows_in(tensors[1:], chunk.counts, dims, self._compression)
        worker.rows[chunk.index] = list(map(RowsOf, chunk.tables, ids, rows))
        nbytes = sum(each.rows.nbytes for parts in worker.rows.values() for each in parts)
        if nbytes > MAX_NBYTES:
            raise ProtocolError(f"a push of over {data_size(MAX_NBYTES)} of rows")

    def complete(self, push: Push, worker: WorkerRecord) -> bool:
        """Put the rows of a push that travelled where its change finds them.

        Return False if messages with rows were lost.

        Raises:
            ProtocolError: there are rows that the push does not have.
            SegmentError: there is no room for them.
        """
        tables = self._state.shard.tables
        if tables is None or worker.lane != "tcp":
            return True
        found = joined(worker.rows)
        came = {each.table: len(each.ids) for each in found}
        counts = dict(enumerate(push.rows)) if push.finite else {}
        if any(came.get(table, 0) < count for table, count in counts.items()):
            return False
        if any(count > counts.get(table, 0) for table, count in came.items()):
            raise ProtocolError(f"a push of {push.rows} rows after {came}")
        worker.rows.clear()
        tables.memory.buffer(worker.buffer).write(found)
        return True

    def _ids_in(self, tensors: Sequence[Tensor], message: Lookup | RowChunk) -> list[Ids]:
        """Return the ids in a message; refuse ids that are not of this shard's rows."""
        if unknown := [t for t in message.tables if not 0 <= t < len(self.tables)]:
            raise ProtocolError(f"rows of table {unknown[0]}, expected 0 to {len(self.tables) - 1}")
        if len(tensors) != 1 or len(message.tables) != len(message.counts):
            raise ProtocolError(f"{len(message.counts)} counts for {len(message.tables)} tables")
        check_size(message.counts, [self.tables[table].dim for table in message.tables])
        found = decoded(tensors[0], message.counts)
        for table, ids in zip(message.tables, found, strict=True):
            limit = self.tables[table].rows
            if limit is not None and len(ids) and not 0 <= ids[0] <= ids[-1] < limit:
                raise ProtocolError(f"ids {ids[0]} to {ids[-1]} of table {table} with {limit} rows")
            if not self._place.holds(shards_of(ids, self._place.shards)).all():
                raise ProtocolError(f"rows of table {table} that are another shard's")
        return found
