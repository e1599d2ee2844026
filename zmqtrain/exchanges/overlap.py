"""Sending a gradient by tcp while the model computes the rest of it: the job's option ``overlap``.

The model reports which variables' gradients are complete (models.written). Their chunks are sent
first; the rest, rows of tables and the push itself follow when the loss is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zmqtrain.actors.actor import guarded
from zmqtrain.actors.outstanding import Outstanding
from zmqtrain.exchanges.lanes import Lane
from zmqtrain.models.tables import RowsOf
from zmqtrain.store.finite import all_finite
from zmqtrain.wire import chunks
from zmqtrain.wire.messages import Push


class Overlap:
    """Sends the pushes of one membership while they are computed."""

    def __init__(self, lanes: Sequence[Lane], on_error: Callable[[Exception], None]) -> None:
        self._lanes = lanes
        self._loop = asyncio.get_running_loop()
        self._send = guarded(self._send_chunks, on_error)
        self._requests: dict[int, Outstanding] = {}  # of the current push, by shard
        self._left: list[list[int]] = []  # incomplete elements of each chunk, by shard
        self._unwritten: set[str] = set()
        self._runs: dict[str, list[tuple[int, int, int]]] = {}  # (shard, start, stop) by variable
        for shard, lane in enumerate(lanes):
            for cut, start, stop in lane.layout.runs:
                self._runs.setdefault(cut.variable.name, []).append((shard, start, stop))

    def begin(self, sequence: int) -> None:
        """Begin a push; :meth:`written` sends its chunks."""
        self._unwritten = set(self._runs)
        flats = [lane.gradient for lane in self._lanes]
        self._left = [
            [len(chunks.at(flat, index)) for index in range(chunks.count(len(flat)))]
            for flat in flats
        ]
        reason = f"push {sequence} is sent while it is computed"
        for shard, lane in enumerate(self._lanes):
            if lane.compressor is not None:
                lane.compressor.hold([])  # the last gradient's feedback goes first
            to_come = lane.chunks_to_come(sequence)
            if to_come is not None:
                self._requests[shard] = lane.link.begin(
                    None, chunks=to_come, out=lane.out, sequence=sequence, reason=reason
                )

    def written(self, names: Sequence[str]) -> None:
        """Send the chunks that these variables complete. Called from the model's thread.

        A gradient that holds NaN or infinity is not sent.
        """
        for name in self._unwritten.intersection(names):
            self._unwritten.remove(name)
            for shard, start, stop in self._runs[name]:
                # In shared memory there is nothing to send.
                if shard in self._requests and all_finite(self._lanes[shard].gradient[start:stop]):
                    complete = self._count(shard, start, stop)
                    self._loop.call_soon_threadsafe(self._send, shard, complete)

    def complete(self, shard: int, push: Push, rows: Sequence[RowsOf] = ()) -> Outstanding | None:
        """Send the rest of a push, and the rows of its gradient, which are known only now.

        Return None if the push was not begun here.
        """
        request, lane = self._requests.pop(shard, None), self._lanes[shard]
        if request is not None:
            if request.chunks is not None:
                lane.with_rows(request.chunks, rows, push.sequence)
            lane.link.complete(request, push, with_chunks=push.finite)
            if lane.compressor is not None and not push.finite:
                lane.compressor.forget()
        return request

    def _count(self, shard: int, start: int, stop: int) -> list[int]:
        """Return the chunks that are complete now that a run of elements is."""
        complete, length = [], chunks.CHUNK_SIZE
        for index in range(start // length, -(-stop // length)):
            begin = index * length
            self._left[shard][index] -= min(stop, begin + length) - max(start, begin)
            if not self._left[shard][index]:
                complete.append(index)
        return complete

    def _send_chunks(self, shard: int, complete: list[int]) -> None:
        request = self._requests.get(shard)
        if request is not None and request.chunks is not None:
            request.chunks.add(complete)
            self._lanes[shard].link.go_on(request)
