"""Rows that a peer asks for, or sends, and that are not those of the ps's tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.bad_input.parts import Someone, Table, table
from tests.constants import Constants
from tests.recommenders import DIM, USERS, Recommender, make_job
from zmqtrain.models.tables import shards_of
from zmqtrain.optim import SGD
from zmqtrain.server import rows as rows_of_server
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.codec import Envelope, encode
from zmqtrain.wire.messages import Lookup, Message, Push, PushReply, RowChunk, RowValues
from zmqtrain.wire.rows import encoded

PUSH = Push(1, 0, 0, 8, 0.5, rows=(2, 0))
ROWS = np.ones(2 * DIM, np.float32)
CHUNK = RowChunk(1, 0, (0,), (2,))


@asynccontextmanager
async def training(index: int = 0) -> AsyncIterator[tuple[Table, Someone]]:
    job = make_job(Recommender(USERS, None), optimizer=SGD(1.0))
    async with table(job, index) as t:
        await t.begin()
        yield t, (await t.worker())[0]


def ids(*given: int) -> Tensor:
    return encoded([np.array(given, np.int64)])


MANY = ids(*range(90_000))  # of rows of more than a frame


@pytest.mark.parametrize(
    ("message", "tensors", "told"),
    [
        *((Lookup((n,), (1,)), [ids(3)], f"rows of table {n}") for n in (-1, 2)),
        (Lookup((0,), (1, 1)), [ids(3)], "2 counts for 1 tables"),
        (Lookup((0,), (1,)), [], "1 counts for 1 tables"),
        (Lookup((0,), (1,), after=9), [ids(3)], "rows after push 9, of 0 received"),
        *((Lookup((0,), (1,), at=n), [ids(3)], f"not kept version {n}") for n in (-1, 4)),
        (Lookup((0,), (1,), after=1, at=4), [ids(3)], "not kept version 4"),
        (Lookup((0,), (2,)), [ids(3)], "2 ids with differences"),
        (Lookup((0,), (-1,)), [ids(3)], "-1 ids"),
        (Lookup((0,), (2,)), [ids(9, 3)], "not sorted and unique"),
        (Lookup((0,), (1,)), [ids(USERS)], f"with {USERS} rows"),
        (Lookup((0,), (1,)), [ids(-1)], f"with {USERS} rows"),
        (Lookup((1,), (90_000,)), [MANY], "1080000 bytes of rows"),
        (replace(CHUNK, tables=(1,), counts=(90_000,)), [MANY, ROWS], "1080000 bytes of rows"),
        (replace(CHUNK, tables=(5,)), [ids(3, 9), ROWS], "rows of table 5"),
        (CHUNK, [ids(3, USERS), ROWS], f"with {USERS} rows"),
        (CHUNK, [ids(3, 9)], "got 0 tensors, expected one of 6"),
        (CHUNK, [ids(3, 9), ROWS[1:]], "expected <f4 [6]"),
        (replace(CHUNK, sequence=2), [ids(3, 9), ROWS], "push 2 of worker 0 follows push 0"),
        (replace(PUSH, rows=(2,)), [], "a push of (2,) rows in 2 tables"),
        (replace(PUSH, rows=(-2, 0)), [], "a push of (-2, 0) rows in 2 tables"),
    ],
)
async def test_wrong_rows_are_refused_and_right_ones_count(
    message: Message, tensors: list[Any], told: str
) -> None:
    async with training() as (t, worker):
        if isinstance(message, Push):
            tensors = [t.zeros]
        assert told in (await worker.refused(message, *tensors))[1]
        await check(t, worker)


async def check(t: Table, worker: Someone) -> None:
    """Have the worker train two rows, which must change as they should."""
    before = await read(worker)
    send_rows(worker)
    reply = (await worker.ask(PUSH, t.zeros)).message
    assert isinstance(reply, PushReply) and reply.result == "applied"
    np.testing.assert_array_equal(await read(worker), before - ROWS)


def send_rows(worker: Someone, chunk: RowChunk = CHUNK) -> None:
    """Send rows as a part of a push, without waiting for an answer."""
    sent = ids(3, 9), Tensor.of(ROWS)
    worker.send(encode(Envelope(chunk, worker.sender, 77, worker.generation, sent)))


async def read(worker: Someone) -> Any:
    reply = await worker.ask(Lookup((0,), (2,)), ids(3, 9))
    assert isinstance(reply.message, RowValues)
    return reply.tensors[0].array()


async def test_lookup_that_is_sent_again_is_answered_once() -> None:
    """It waits for push 1. A second answer of up to 1 MiB would only delay what follows."""
    async with training() as (t, worker):
        message = Lookup((0,), (2,), after=1)
        lookup = Envelope(message, worker.sender, 88, worker.generation, (ids(3, 9),))
        received: list[Envelope] = []
        worker.on_received = received.append
        for _ in range(4):
            worker.send(encode(lookup))
        await check(t, worker)
        found = [each for each in received if each.request_id == 88]
        assert len(found) == 1
        assert isinstance(found[0].message, RowValues) and found[0].message.version == 1


async def test_push_without_all_of_its_rows_counts_as_lost_until_both_have_come() -> None:
    async with training() as (t, worker):
        before = await read(worker)
        lost = asyncio.ensure_future(worker.ask(PUSH, t.zeros))
        np.testing.assert_array_equal(await read(worker), before)
        assert not lost.done()
        lost.cancel()
        await check(t, worker)


async def test_push_with_more_rows_than_it_says_is_refused() -> None:
    async with training() as (t, worker):
        send_rows(worker)
        push = replace(PUSH, rows=(1, 0))
        assert "a push of (1, 0) rows after {0: 2}" in (await worker.refused(push, t.zeros))[1]


async def test_rows_that_come_twice_count_once() -> None:
    async with training() as (t, worker):
        send_rows(worker)
        await check(t, worker)


async def test_rows_of_more_memory_than_a_push_may_have_are_refused(constants: Constants) -> None:
    constants(rows_of_server, MAX_NBYTES=ROWS.nbytes)
    async with training() as (t, worker):
        await check(t, worker)
        send_rows(worker, replace(CHUNK, sequence=2))
        more = replace(CHUNK, sequence=2, index=1, tables=(1,))
        assert "of rows" in (await worker.refused(more, ids(3, 9), ROWS))[1]


async def test_rows_of_another_shard_are_refused() -> None:
    async with training(index=1) as (_, worker):
        far = [i for i in range(USERS) if shards_of(np.array([i]), 2)[0] == 0][:2]
        for message, more in ((Lookup((0,), (2,)), []), (CHUNK, [ROWS])):
            assert "another shard's" in (await worker.refused(message, ids(*far), *more))[1]


async def test_strangers_read_no_rows() -> None:
    async with training() as (t, _):
        stranger = t.someone("worker", 5)
        assert "has not joined" in (await stranger.refused(Lookup((0,), (1,)), ids(3)))[1]
