"""Laws: whatever is said to a ps, and by whomever, it serves those who do right."""

from __future__ import annotations

import asyncio
import typing

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bad_input.parts import make_job, table
from tests.wire.values import values_of
from zmqtrain.wire.buffers import DTYPES, Tensor
from zmqtrain.wire.codec import Envelope, encode
from zmqtrain.wire.messages import Message, Parameters, Push, PushReply, Read

# Small numbers hit what exists.
ADDRESSABLE = {
    int: st.one_of(st.integers(-2, 3), st.integers(-(2**63), 2**64 - 1)),
    float: st.floats(),
    str: st.one_of(st.sampled_from(["apply", "release", "reduce"]), st.text(max_size=9)),
    bool: st.booleans(),
}
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
