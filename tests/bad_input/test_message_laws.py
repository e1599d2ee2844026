"""Laws: whatever is said to a ps, and by whomever, it serves those who do right."""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
import typing
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bad_input.parts import make_job, table
from tests.fuzz import inputs
from tests.wire.values import values_of
from zmqtrain.wire.buffers import DTYPES, Buffer, Tensor
from zmqtrain.wire.codec import Envelope, encode
from zmqtrain.wire.messages import Message, Parameters, Push, PushReply, Read

# Small numbers hit what exists.
ADDRESSABLE = {
    int: st.one_of(st.integers(-2, 3), st.integers(-(2**63), 2**64 - 1)),
    float: st.floats(),
    str: st.one_of(st.sampled_from(["apply", "release", "reduce"]), st.text(max_size=9)),
    bool: st.booleans(),
}
GROWTH_NBYTES = 1 << 15
"""What five hundred hostile messages may leave behind."""

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
@settings(max_examples=150)
def test_no_message_of_anyone_but_the_chief_harms_a_ps_or_another_worker(
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
    """What is allocated is counted, and nothing is logged: pytest keeps what is."""
    logging.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    logging.disable(logging.NOTSET)


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
        for _ in range(10):  # what these leave is replaced by what follows
            count += await suffer()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            count += await suffer()
        assert tracemalloc.get_traced_memory()[0] - before < GROWTH_NBYTES
        registry = t.ps.metrics.registry
        assert registry.get_sample_value("zmqtrain_decode_errors_total") == count > 900
        await t.check(*await t.worker())
