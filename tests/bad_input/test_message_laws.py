"""Laws: a ps serves correct tasks, whatever messages it gets from others."""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
import typing
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.bad_input.parts import Table, make_job, table
from tests.fuzz import inputs
from tests.wire.values import values_of
from zmqtrain.wire.buffers import DTYPES, Buffer, Tensor
from zmqtrain.wire.codec import Envelope, encode
from zmqtrain.wire.control import Initialize, Shutdown
from zmqtrain.wire.messages import (
    Chunk,
    Heartbeat,
    Join,
    Leave,
    Message,
    Parameters,
    Pull,
    Push,
    PushReply,
    Read,
)

# Small numbers hit what exists.
ADDRESSABLE = {
    int: st.one_of(st.integers(-2, 3), st.integers(-(2**63), 2**64 - 1)),
    float: st.floats(),
    str: st.one_of(st.sampled_from(["apply", "release", "reduce"]), st.text(max_size=9)),
    bool: st.booleans(),
}
GROWTH_NBYTES = 1 << 15
"""Growth of memory that hundreds of hostile messages may cause."""

KEYS = st.sampled_from(["orders", "step", "stuck", "bytes", "x"])

MESSAGES = st.one_of(*(values_of(kind, ADDRESSABLE, KEYS) for kind in typing.get_args(Message)))
TENSORS = st.lists(
    st.builds(
        lambda dtype, size: Tensor.of(np.zeros(size, dtype)),
        st.sampled_from(sorted(DTYPES)),
        st.integers(0, 3),
    ),
    max_size=2,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(["stranger", "worker", "ps"]), MESSAGES, TENSORS), max_size=8
    )
)
@settings(max_examples=60)
def test_no_message_of_another_task_harms_a_ps_or_a_worker(
    said: list[tuple[str, Message, list[Tensor]]],
) -> None:
    async def scenario() -> None:
        async with table(make_job()) as t:
            await t.begin()
            culprit, _ = await t.worker(0)
            worker, batches = await t.worker(1)
            follower = t.someone("ps", 1)
            talkers = {"worker": culprit, "stranger": t.someone("client", 9), "ps": follower}
            for number, (who, message, tensors) in enumerate(said):
                sender, generation = talkers[who].sender, talkers[who].generation
                envelope = Envelope(message, sender, 1000 + number, generation, tuple(tensors))
                talkers[who].send(encode(envelope))
            before = t.ps.state.version
            reply = await worker.ask(Push(1, before, batches[0], 20, 0.5), t.zeros)
            assert isinstance(reply.message, PushReply)
            assert reply.message.result in ("applied", "accumulated")
            assert isinstance((await t.someone("client", 7).ask(Read())).message, Parameters)

    asyncio.run(scenario())


@pytest.fixture
def traced() -> Iterator[None]:
    """Trace allocations. Logging is off, since pytest keeps log records."""
    logging.disable()
    gc.collect()
    gc.freeze()  # a collection looks at the objects of the test alone
    tracemalloc.start()
    yield
    tracemalloc.stop()
    logging.disable(logging.NOTSET)


def refused_messages(t: Table, dice: Random) -> Iterator[tuple[Message, list[NDArray[Any]]]]:
    """Yield messages that a joined worker must not send now, with their tensors."""
    endless = {str(n): "y" * dice.randrange(9000) for n in range(100)}
    for other in ({"seed": str(dice.randrange(1, 99))}, endless):
        yield Join("stranger/1", t.fingerprint | other, "there:2", "", "", 0), []
    push = Push(1, t.ps.state.version, 0, 20, 0.5)
    size = dice.choice([0, 1, 3, 1000, 600_000])
    for message in (push, Chunk(1, dice.choice([-1, 0, 1, 9]))):
        yield message, [np.zeros(size, np.float32)]
        yield message, [t.zeros.astype(dice.choice(["<f2", "<f8", "<i4", "|u1"]))]
        yield message, [t.zeros, t.zeros]
    yield replace(push, sequence=dice.randrange(2, 9)), [t.zeros]
    for message in (Initialize(None), Shutdown(0, "it is over")):
        yield message, []


@pytest.mark.usefixtures("traced")
async def test_refused_messages_leave_nothing_behind() -> None:
    dice = Random(3)
    async with table(make_job()) as t:
        await t.begin()
        member, batches = await t.worker(1)
        former = t.someone("worker", 1)
        former.be(member.sender.incarnation - 1, 1)

        async def send_all() -> None:
            for message, tensors in refused_messages(t, dice):
                await member.refused(message, *tensors)
            for old in (Push(1, 0, batches[0], 20, 0.5), Pull(), Heartbeat(), Leave("go")):
                await former.refused(old)
            gc.collect()

        for _ in range(10):  # these leave what later ones replace
            await send_all()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            await send_all()
        assert tracemalloc.get_traced_memory()[0] - before < GROWTH_NBYTES
        registry = t.ps.metrics.registry
        assert registry.get_sample_value("zmqtrain_decode_errors_total") == 0
        await t.check(member, batches)


def damaged(dice: Random) -> Iterator[list[Buffer]]:
    """Yield each kind of message with its header cut, and noise."""
    for _, content in inputs.examples():
        header, *frames = inputs.frames_of(content)
        yield [header[: dice.randrange(1, len(header))], *frames]
    yield [dice.randbytes(dice.randrange(200)) for _ in range(dice.randrange(1, 5))]
    yield [b"GET / HTTP/1.1\r\nHost: ps\r\n\r\n"]


@pytest.mark.usefixtures("traced")
async def test_bytes_that_are_no_message_are_counted_and_leave_nothing_behind() -> None:
    dice = Random(3)
    async with table(make_job()) as t:
        await t.begin()
        stranger = t.someone("client", 9)

        async def suffer() -> int:
            sent = list(damaged(dice))
            for frames in sent:
                stranger.send(frames)
            await stranger.ask(Read(values=False))
            gc.collect()
            return len(sent)

        count = 0
        for _ in range(10):  # these leave what later ones replace
            count += await suffer()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            count += await suffer()
        assert tracemalloc.get_traced_memory()[0] - before < GROWTH_NBYTES
        registry = t.ps.metrics.registry
        assert registry.get_sample_value("zmqtrain_decode_errors_total") == count > 900
        await t.check(*await t.worker())
