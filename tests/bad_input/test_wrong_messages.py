"""What a ps makes of messages that it should not get: a refusal that says why, and nothing else."""

from __future__ import annotations

import asyncio
import types
import typing
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain import Job
from zmqtrain.cluster import Role
from zmqtrain.config import TaskConfig
from zmqtrain.roles.ps import ParameterServer
from zmqtrain.transport.base import Peer
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.wire import codec
from zmqtrain.wire.buffers import DTYPES, Buffer, Tensor
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import (
    Done,
    GetStatus,
    Heartbeat,
    Initialize,
    Join,
    Leave,
    Message,
    Order,
    Orders,
    Pull,
    Push,
    Read,
    Refusal,
    Release,
    Shutdown,
    Status,
    SwitchPolicy,
    Welcome,
)

PS = ("ipc://memory/0", "ipc://memory/1")
LIMIT_S = 10.0

MakeJob = Callable[..., Job]


class Someone:
    """A connected peer that says whatever it is told to, and reads the answers."""

    def __init__(self, transport: MemoryTransport, address: str, role: str, index: int) -> None:
        self.sender = Sender(role, index)
        self.epoch = 0
        self._endpoint = transport.connect(address)
        self._endpoint.start(self._receive)
        self._replies: dict[int, asyncio.Future[Envelope]] = {}
        self._last_id = 0

    async def ask(self, message: Message, *tensors: Any) -> Envelope:
        """Send a request and return its reply."""
        self._last_id += 1
        reply = self._replies[self._last_id] = asyncio.get_running_loop().create_future()
        sent = tuple(
            tensor if isinstance(tensor, Tensor) else Tensor.of(tensor) for tensor in tensors
        )
        self.send(encode(Envelope(message, self.sender, self._last_id, self.epoch, sent)))
        async with asyncio.timeout(LIMIT_S):
            return await reply

    async def refused(self, message: Message, *tensors: Any) -> tuple[str, str]:
        """Send what is wrong; return the kind of error and its text."""
        reply = (await self.ask(message, *tensors)).message
        assert isinstance(reply, Refusal), reply
        return reply.error, reply.text

    def send(self, frames: Sequence[Buffer]) -> None:
        self._endpoint.send(frames)

    def be(self, incarnation: int, epoch: int) -> None:
        self.sender = replace(self.sender, incarnation=incarnation)
        self.epoch = epoch

    async def join(self, fingerprint: dict[str, str]) -> None:
        """Become a member."""
        reply = await self.ask(Join(f"{self.sender}/1", fingerprint, "here:1", ""))
        assert isinstance(reply.message, Welcome), reply.message
        self.be(reply.message.incarnation, reply.epoch)

    def _receive(self, peer: Peer, frames: list[Buffer]) -> None:
        envelope = decode(frames)
        if envelope.request_id in self._replies:
            self._replies[envelope.request_id].set_result(envelope)


class Table:
    """A live ps, and everyone who talks to it."""

    def __init__(self, job: Job, index: int = 0) -> None:
        self.transport = MemoryTransport()
        self.fingerprint = job.fingerprint(1 + index)
        config = TaskConfig(role=Role.PS, job="job.py", index=index, ps=PS[: 1 + index], workers=2)
        self.ps = ParameterServer(config, job, self.transport)
        self.zeros = np.zeros(self.ps.shard.layout.size, np.float32)
        self._address = PS[index]

    def someone(self, role: str, index: int = 0) -> Someone:
        return Someone(self.transport, self._address, role, index)

    async def member(self, role: str, index: int = 0) -> Someone:
        someone = self.someone(role, index)
        await someone.join(self.fingerprint)
        return someone

    async def begin(self) -> Someone:
        """Have a chief begin epoch 1; return it."""
        chief = await self.member("chief")
        chief.epoch = 1
        await chief.ask(Initialize(None))
        return chief

    async def worker(self, index: int = 0) -> tuple[Someone, list[int]]:
        """Return a worker that was let in, and the batches it holds."""
        worker = await self.member("worker", index)
        release = (await worker.ask(Pull())).message
        assert isinstance(release, Release)
        return worker, list(release.batches)

    async def check(self, worker: Someone, batches: list[int], sequence: int = 1) -> None:
        """Have the worker do a right step, which must count."""
        before = self.ps.shard.version
        reply = await worker.ask(Push(sequence, before, batches[0], 20, 0.5), self.zeros)
        assert isinstance(reply.message, Release)
        assert (reply.message.result, reply.message.version) == ("applied", before + 1)


@asynccontextmanager
async def table(job: Job, index: int = 0) -> AsyncIterator[Table]:
    """A running ps; that it fails is an error of the block."""
    table = Table(job, index)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(table.ps.run())
        yield table
        assert not running.done()
        running.cancel()


PUSH = Push(1, 0, 0, 20, 0.5)
GRADIENT = np.zeros(2, np.float32)


SAME_JOB = "both tasks must run the same job with the same number of ps"


@pytest.mark.parametrize(
    ("push", "tensors", "text"),
    [
        (
            PUSH,
            [np.zeros(3, np.float32)],
            f"got a tensor of <f4 [3], expected <f4 [2]: {SAME_JOB}",
        ),
        (
            PUSH,
            [np.zeros((1, 2), np.float32)],
            f"got a tensor of <f4 [1, 2], expected <f4 [2]: {SAME_JOB}",
        ),
        (PUSH, [np.zeros(2)], f"got a tensor of <f8 [2], expected <f4 [2]: {SAME_JOB}"),
        (PUSH, [], "a push of 0 tensors, expected one, or none with finite False"),
        (PUSH, [GRADIENT] * 2, "a push of 2 tensors, expected one, or none with finite False"),
        (
            replace(PUSH, finite=False),
            [GRADIENT],
            "a push of 1 tensors, expected one, or none with finite False",
        ),
        (replace(PUSH, sequence=3), [GRADIENT], "push 3 of worker 0 follows push 0"),
        (replace(PUSH, sequence=-7), [GRADIENT], "push -7 of worker 0 was answered long ago"),
        (
            replace(PUSH, batch=99),
            [GRADIENT],
            "worker 0 pushes batch 99, which it has no lease on",
        ),
        (replace(PUSH, examples=0), [GRADIENT], "a push of 0 examples, expected at least 1"),
    ],
)
async def test_wrong_push_is_refused_and_a_right_one_counts(
    make_job: MakeJob, push: Push, tensors: list[Any], text: str
) -> None:
    async with table(make_job()) as t:
        await t.begin()
        worker, batches = await t.worker()
        assert batches[0] == 0
        assert (await worker.refused(push, *tensors))[1] == text
        assert t.ps.shard.version == 0
        await t.check(worker, batches)


@pytest.mark.parametrize(
    ("incarnation", "epoch", "error", "text"),
    [
        (1, 1, "FencedError", "worker 0 (incarnation 1) has not joined"),
        (0, 1, "FencedError", "worker 0 (incarnation 0) has not joined"),
        (None, 7, "RefusedError", "push of epoch 7, the job is in epoch 1"),
    ],
)
async def test_push_of_another_life_is_refused(
    make_job: MakeJob, incarnation: int | None, epoch: int, error: str, text: str
) -> None:
    async with table(make_job()) as t:
        await t.begin()
        worker, batches = await t.worker()
        own = worker.sender.incarnation
        worker.be(own if incarnation is None else incarnation, epoch)
        assert await worker.refused(PUSH, t.zeros) == (error, text)
        worker.be(own, 1)
        await t.check(worker, batches)


async def test_push_before_the_parameters_are_there_is_refused(make_job: MakeJob) -> None:
    async with table(make_job()) as t:
        worker = await t.member("worker")
        pulled = asyncio.ensure_future(worker.ask(Pull()))
        text = "ps 0 holds no parameters yet, so a push has no base"
        assert await worker.refused(PUSH, t.zeros) == ("RefusedError", text)
        await t.begin()
        release = (await pulled).message
        assert isinstance(release, Release)
        worker.epoch = 1
        await t.check(worker, list(release.batches))


async def test_push_before_the_last_one_was_answered_is_refused(make_job: MakeJob) -> None:
    async with table(make_job(policy="bounded-staleness:0")) as t:
        await t.begin()
        first, batches = await t.worker(0)
        second, others = await t.worker(1)
        held = asyncio.ensure_future(first.ask(Push(1, 0, batches[0], 20, 0.5), t.zeros))
        await asyncio.sleep(0)
        early = Push(2, 0, batches[1], 20, 0.5)
        text = "push 2 of worker 0 came before 1 was answered"
        assert await first.refused(early, t.zeros) == ("ProtocolError", text)
        await t.check(second, others)
        release = (await held).message
        assert isinstance(release, Release)
        assert release.result == "applied"


@pytest.mark.parametrize(
    ("role", "index"), [("worker", -1), ("ps", 1), ("chief", 1), ("client", 5), ("", 0)]
)
async def test_task_that_the_cluster_does_not_have_cannot_join(
    make_job: MakeJob, role: str, index: int
) -> None:
    async with table(make_job()) as t:
        join = Join("n/1", t.fingerprint, "here:1", "")
        answer = await t.someone(role, index).refused(join)
        assert answer == ("RefusedError", f"the cluster has no {role} {index}")


async def test_task_with_another_job_hears_of_both_sides(make_job: MakeJob) -> None:
    async with table(make_job()) as t:
        other = make_job(steps=7, seed=3).fingerprint(2)
        answer = await t.someone("worker", 1).refused(Join("n/1", other, "here:1", ""))
        assert answer == (
            "RefusedError",
            (
                "worker 1 runs another job than ps 0: placement: greedy, 262144 B parts, 2 ps at "
                "worker 1, greedy, 262144 B parts, 1 ps at ps 0; seed: 3 at worker 1, 0 at ps 0; "
                "steps: 7 at worker 1, 200 at ps 0. Start every task with the same job file and "
                "options"
            ),
        )


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Initialize(None), "only the chief initialises, not worker 0"),
        (Shutdown(0, "I say so"), "only the chief ends a run, not worker 0"),
        (Done("and dusted"), "ps 0 takes no Done from worker 0"),
        (Orders(1, (Order("apply"),)), "ps 0 takes no Orders from worker 0"),
    ],
)
async def test_worker_cannot_give_orders(make_job: MakeJob, message: Message, text: str) -> None:
    async with table(make_job()) as t:
        await t.begin()
        worker, batches = await t.worker()
        assert (await worker.refused(message))[1] == text
        await t.check(worker, batches)


SPECS = [
    ("nope", "unknown policy 'nope': expected hogwild, "),
    ("bounded-staleness:-1", "policy bounded-staleness:S: got '-1', expected a whole number >= 0"),
    ("sync-replicas:often", "unknown option 'often' of sync-replicas: expected aggregate=R"),
    ("zmqtrain.errors:Nothing", "policy 'zmqtrain.errors:Nothing': module zmqtrain.errors has no"),
    ("math:sqrt:x", "policy 'math:sqrt:x' cannot be made: TypeError: must be real number, no"),
    (".relative:x", "unknown policy '.relative:x': expected hogwild, "),
]


@pytest.mark.parametrize(("spec", "text"), SPECS)
async def test_live_policy_is_not_changed_to_one_that_cannot_be_made(
    make_job: MakeJob, spec: str, text: str
) -> None:
    async with table(make_job()) as t:
        await t.begin()
        worker, batches = await t.worker()
        error, told = await t.someone("client", 1).refused(SwitchPolicy(spec))
        assert (error, told[: len(text)]) == ("RefusedError", text)
        await t.check(worker, batches)


async def test_peer_of_another_version_hears_both_versions(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with table(make_job()) as t:
        await t.begin()
        worker, batches = await t.worker()
        frames = encode(Envelope(Heartbeat(), Sender("worker", 1), 5))
        other = msgpack.packb([99, *msgpack.unpackb(frames[0])[1:]])
        stranger = t.someone("worker", 1)
        reply = stranger._replies[5] = asyncio.get_running_loop().create_future()
        stranger.send([other])
        async with asyncio.timeout(LIMIT_S):
            message = (await reply).message
        assert message == Refusal(
            "ProtocolError",
            f"the peer speaks protocol version 99, this task version {codec.PROTOCOL_VERSION}: "
            "install the same zmqtrain on every host",
        )
        await t.check(worker, batches)


async def test_follower_takes_no_orders_but_from_its_link_to_the_lead(make_job: MakeJob) -> None:
    async with table(make_job(partition_nbytes=4), index=1) as t:
        impostor = t.someone("ps", 0)
        orders = Orders(1, (Order("apply", (0,)), Order("reduce"), Order("switch", text="nope")))
        assert await impostor.refused(orders) == (
            "RefusedError",
            "ps 1 takes orders over its own link to ps 0 only",
        )


async def test_facts_that_are_no_numbers_are_left_out_of_the_status(make_job: MakeJob) -> None:
    async with table(make_job()) as t:
        await t.begin()
        worker, batches = await t.worker()
        facts = {"step": float("nan"), "bytes": float("inf"), "orders": 1.0}
        await worker.ask(Heartbeat(facts=facts))
        status = (await t.someone("client", 1).ask(GetStatus())).message
        assert isinstance(status, Status)
        assert [task.facts for task in status.tasks if task.task == "worker 0"] == [{"orders": 1.0}]
        await t.check(worker, batches)


ADDRESSABLE = {
    int: st.one_of(st.integers(-2, 3), st.integers(-(2**63), 2**64 - 1)),
    float: st.floats(),
    str: st.one_of(st.sampled_from(["apply", "release", "reduce"]), st.text(max_size=9)),
    bool: st.booleans(),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Every value of a type that messages are declared with; small numbers hit what exists."""
    if hint in ADDRESSABLE:
        return ADDRESSABLE[hint]
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{f.name: values_of(hints[f.name]) for f in fields(hint)})
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Union | types.UnionType:
            return st.one_of(*(values_of(argument) for argument in arguments))
        case origin if origin is tuple:
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        case origin if origin is dict:
            keys = st.sampled_from(["orders", "step", "stuck", "bytes", "x"])
            return st.dictionaries(keys, values_of(arguments[1]), max_size=3)
    return st.none()


MESSAGES = st.one_of(*(values_of(kind) for kind in typing.get_args(Message)))
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
@settings(deadline=None, max_examples=150)
def test_no_message_of_anyone_but_the_chief_harms_a_ps_or_another_worker(
    make_job: MakeJob, said: list[tuple[str, Message, list[Tensor]]]
) -> None:
    async def scenario() -> None:
        async with table(make_job()) as t:
            await t.begin()
            culprit, _ = await t.worker(0)
            worker, batches = await t.worker(1)
            follower = t.someone("ps", 1)
            talkers = {"worker": culprit, "stranger": t.someone("client", 9), "ps": follower}
            for number, (who, message, tensors) in enumerate(said):
                sender, epoch = talkers[who].sender, talkers[who].epoch
                envelope = Envelope(message, sender, 1000 + number, epoch, tuple(tensors))
                talkers[who].send(encode(envelope))
            before = t.ps.shard.version
            reply = await worker.ask(Push(1, before, batches[0], 20, 0.5), t.zeros)
            assert isinstance(reply.message, Release)
            assert reply.message.result in ("applied", "accumulated")
            assert (await t.someone("client", 7).ask(Read())).message is not None

    asyncio.run(scenario())


BYTES = st.lists(st.binary(max_size=40), max_size=4)


@given(st.lists(BYTES, min_size=1, max_size=10))
@settings(deadline=None, max_examples=60)
def test_bytes_that_are_no_message_are_counted_and_harm_nobody(
    make_job: MakeJob, garbage: list[list[bytes]]
) -> None:
    async def scenario() -> None:
        async with table(make_job()) as t:
            await t.begin()
            worker, batches = await t.worker()
            stranger = t.someone("client", 9)
            for frames in garbage:
                stranger.send(frames)
            await t.check(worker, batches)
            registry = t.ps.metrics.registry
            assert registry.get_sample_value("zmqtrain_decode_errors_total") == len(garbage)

    asyncio.run(scenario())


async def test_left_worker_is_told_that_it_has_not_joined(make_job: MakeJob) -> None:
    async with table(make_job()) as t:
        await t.begin()
        worker, _ = await t.worker()
        assert (await worker.ask(Leave("enough"))).message == Done()
        error, text = await worker.refused(PUSH, t.zeros)
        assert (error, text.endswith("has not joined")) == ("FencedError", True)
