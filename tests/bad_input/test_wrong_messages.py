"""Messages that a ps must refuse: it answers with the reason and changes nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bad_input.parts import Someone, Table, make_job, table
from tests.plans import planned
from zmqtrain.errors import CheckpointError
from zmqtrain.fingerprint import DATA
from zmqtrain.protocol.orders import Apply, Reduce, Switch
from zmqtrain.protocol.status import Status, Wait
from zmqtrain.store.checkpoint import attempt_of
from zmqtrain.store.logdir import claimed
from zmqtrain.wire.control import GetStatus, Initialize, Keep, Shutdown, SwitchPolicy
from zmqtrain.wire.messages import (
    Done,
    Heartbeat,
    Join,
    Leave,
    Mapped,
    MapSegment,
    Message,
    Orders,
    Parameters,
    Pull,
    PullReply,
    Push,
    PushReply,
    Read,
)

PUSH = Push(1, 0, 0, 20, 0.5)


@asynccontextmanager
async def training() -> AsyncIterator[tuple[Table, Someone, list[int]]]:
    """Run a ps; yield it with a worker and the batches that the worker holds."""
    async with table(make_job()) as t:
        await t.begin()
        yield (t, *await t.worker())


GRADIENT = np.zeros(17, np.float32)  # one weight, zeros up to 64 bytes, one bias


@pytest.mark.parametrize(
    ("push", "tensors", "told"),
    [
        (PUSH, [np.zeros(3, np.float32)], "<f4 [3]"),
        (PUSH, [np.zeros((1, 17), np.float32)], "<f4 [1, 17]"),
        (PUSH, [np.zeros(17)], "<f8 [17]"),
        (PUSH, [], "0 tensors"),
        (PUSH, [GRADIENT] * 2, "2 tensors"),
        (replace(PUSH, finite=False), [GRADIENT], "1 tensors"),
        (replace(PUSH, sequence=3), [GRADIENT], "push 3 of worker 0 follows push 0"),
        *(
            (replace(PUSH, sequence=n), [GRADIENT], f"push {n} of worker 0 follows push 0")
            for n in (0, -7)
        ),
        (replace(PUSH, batch=99), [GRADIENT], "batch 99"),
        (replace(PUSH, sums=dict.fromkeys(map(str, range(17)), 0.0)), [GRADIENT], "17 sums"),
        (replace(PUSH, sums={"x" * 257: 0.0}), [GRADIENT], "1 sums named 'xxx"),
        (replace(PUSH, sums={"a\nb": 0.0}), [GRADIENT], "1 sums named 'a"),
        *((replace(PUSH, absent=(0, n)), [GRADIENT], f"variable {n}") for n in (-1, 2)),
        *((replace(PUSH, examples=n), [GRADIENT], f"push of {n} examples") for n in (0, 1 << 31)),
        *(
            (replace(PUSH, weight=weight), [GRADIENT], f"push of weight {weight!r}")
            for weight in (-1.0, 0.0, 1e-20, 1e16, float("inf"), float("nan"))
        ),
    ],
)
async def test_wrong_push_is_refused_and_a_right_one_counts(
    push: Push, tensors: list[Any], told: str
) -> None:
    async with training() as (t, worker, batches):
        assert batches[0] == 0
        assert told in (await worker.refused(push, *tensors))[1]
        assert t.ps.state.version == 0
        await t.check(worker, batches)


@pytest.mark.parametrize(
    ("incarnation", "generation", "error", "text"),
    [
        (1, 1, "FencedError", "worker 0 (incarnation 1) has not joined"),
        (0, 1, "FencedError", "worker 0 (incarnation 0) has not joined"),
        (None, 7, "FencedError", "ps 0 is still in generation 1"),
        (None, 0, "RefusedError", "push of generation 0, the job is in generation 1"),
    ],
)
async def test_push_of_another_life_is_refused(
    incarnation: int | None, generation: int, error: str, text: str
) -> None:
    async with training() as (t, worker, batches):
        own = worker.sender.incarnation
        worker.be(own if incarnation is None else incarnation, generation)
        assert await worker.refused(PUSH, t.zeros) == (error, text)
        fenced = t.ps.metrics.registry.get_sample_value(
            "zmqtrain_pushes_total", {"result": "fenced"}
        )
        assert fenced == ("has not joined" in text)
        worker.be(own, 1)
        await t.check(worker, batches)


async def test_push_before_the_parameters_are_there_is_refused() -> None:
    async with table(make_job()) as t:
        worker = await t.member("worker")
        pulled = asyncio.ensure_future(worker.ask(Pull()))
        text = "ps 0 holds no parameters yet, so a push has no base"
        assert await worker.refused(PUSH, t.zeros) == ("RefusedError", text)
        await t.begin()
        reply = (await pulled).message
        assert isinstance(reply, PullReply)
        worker.generation = 1
        await t.check(worker, list(reply.batches))


async def test_push_before_the_last_one_was_answered_is_refused() -> None:
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
        assert isinstance(release, PushReply)
        assert release.result == "applied"


@pytest.mark.parametrize(
    ("role", "index"), [("worker", -1), ("ps", 1), ("chief", 1), ("client", 5), ("", 0)]
)
async def test_task_that_the_cluster_does_not_have_cannot_join(role: str, index: int) -> None:
    async with table(make_job()) as t:
        join = Join("n/1", t.fingerprint, "here:1", "", "", 0)
        answer = await t.someone(role, index).refused(join)
        assert answer == ("RefusedError", f"the cluster has no {role} {index}")


async def test_task_with_another_job_is_refused_with_both_sides() -> None:
    async with table(make_job()) as t:
        other = planned(make_job(steps=7, seed=3), ps=2).fingerprint()
        answer = await t.someone("worker", 1).refused(Join("n/1", other, "here:1", "", "", 0))
        assert answer[0] == "RefusedError"
        for difference in ("2 ps at worker 1", "1 ps at ps 0", "seed: 3 at worker 1, 0 at ps 0"):
            assert difference in answer[1]


async def test_task_with_other_data_than_the_first_is_refused() -> None:
    async with table(make_job()) as t:
        await t.someone("worker", 0).join(t.fingerprint | {DATA: "10 examples"})
        other = t.fingerprint | {DATA: "9 examples"}
        error, text = await t.someone("worker", 1).refused(Join("n/1", other, "", "", "", 0))
        assert error == "RefusedError"
        assert "data: 9 examples at worker 1, 10 examples at ps 0" in text
        await t.someone("worker", 2).join(t.fingerprint | {DATA: "10 examples"})
        await t.someone("chief").join(t.fingerprint)  # who has loaded none says nothing of it


async def test_chief_of_a_wrong_list_of_ps_does_not_end_the_job_of_another() -> None:
    """It has joined elsewhere, so its life has a later number; here it was refused."""
    async with table(make_job()) as t:
        chief = await t.begin()
        worker, batches = await t.worker()
        other = t.someone("chief")
        other.be(chief.sender.incarnation + 1000, 1)
        error, text = await other.refused(Shutdown(77, "the chief failed: it was refused"))
        assert (error, text[-14:]) == ("FencedError", "has not joined")
        await t.check(worker, batches)


NOWHERE = ["/etc", "/etc/passwd", "../../x", "a\0b", ""]
NOWHERE += ["LOGDIR/checkpoints/..", "LOGDIR/step-00000001"]
"""Directories in which no checkpoint can be, and none that a peer may name."""


@pytest.mark.parametrize("text", NOWHERE)
async def test_chief_names_no_directory_but_that_of_a_checkpoint(text: str, tmp_path: Path) -> None:
    text = text.replace("LOGDIR", str(tmp_path))
    async with table(make_job(logdir=str(tmp_path))) as t:
        chief = await t.begin()
        chief.generation = 2
        error, told = await chief.refused(Initialize(text))
        assert (error, "not a directory of a checkpoint" in told) == ("CheckpointError", True)
        if text and not text.endswith("step-00000001"):
            error, told = await chief.refused(Initialize(None, text))
            assert (error, "not a directory of a checkpoint" in told) == ("CheckpointError", True)


@pytest.mark.parametrize("text", NOWHERE)
def test_shard_is_written_into_no_directory_but_that_of_an_attempt(text: str) -> None:
    with pytest.raises(CheckpointError, match="not a directory of a checkpoint"):
        attempt_of(text)
    assert attempt_of("runs/checkpoints/step-00000010.tmp-0123abcd").name == (
        "step-00000010.tmp-0123abcd"
    )


@pytest.mark.parametrize("is_claimed", [True, False])
async def test_ps_warns_if_it_does_not_see_the_lock_of_the_logdir(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_claimed: bool
) -> None:
    """As on a file system whose locks are of one host."""
    made = tmp_path / "checkpoints/made"
    made.mkdir(parents=True)
    async with table(make_job(logdir=str(tmp_path))) as t:
        chief = await t.member("chief")
        with claimed(str(tmp_path) if is_claimed else None):
            await chief.ask(Initialize(None, str(made)))
    assert (f"{tmp_path}: this host does not see that the chief" in caplog.text) != is_claimed
    with claimed(str(tmp_path)):
        pass


async def test_worker_that_only_asks_whether_it_is_known_is_not_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with table(make_job()) as t:
        await t.begin()
        worker, batches = await t.worker()
        caplog.set_level("INFO")
        assert (await worker.ask(MapSegment("shm", ""))).message == Mapped(-1)
        assert caplog.messages == []
        await t.check(worker, batches)
        worker.be(worker.sender.incarnation - 1, worker.generation)
        assert (await worker.refused(MapSegment("shm", "")))[0] == "FencedError"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Shutdown(0, "I say so"), "worker 0 may not send Shutdown, which is for a chief"),
        (
            MapSegment("ether", "0"),  # type: ignore[arg-type]
            "MapSegment.lane: expected memory or shm, got 'ether'",
        ),
        (Done("and dusted"), "ps 0 takes no Done from worker 0"),
        (Orders(1, (Apply(0),)), "ps 0 takes no Orders from worker 0"),
    ],
)
async def test_worker_may_not_send_reserved_or_invalid_messages(
    message: Message, text: str
) -> None:
    async with training() as (t, worker, batches):
        assert (await worker.refused(message))[1] == text
        await t.check(worker, batches)


@pytest.mark.parametrize(
    "spec", ["nope", "hogwild:", "bounded-staleness:-1", "os:abort", "os:_exit:7", ".relative:x"]
)
async def test_live_policy_is_not_changed_to_one_that_cannot_be_made(spec: str) -> None:
    async with training() as (t, worker, batches):
        error, told = await t.someone("client", 1).refused(SwitchPolicy(spec))
        assert error == "RefusedError" and told
        await t.check(worker, batches)


async def test_follower_takes_no_orders_but_from_its_link_to_the_lead() -> None:
    async with table(make_job(partition_nbytes=4), index=1) as t:
        impostor = t.someone("ps", 0)
        orders = Orders(1, (Apply(0), Reduce(()), Switch("nope")))
        assert await impostor.refused(orders) == (
            "RefusedError",
            "ps 1 takes orders over its own link to ps 0 only",
        )


async def test_version_that_is_not_kept_is_refused() -> None:
    async with table(make_job()) as t:
        chief = await t.begin()
        worker, batches = await t.worker()
        _, text = await chief.refused(Keep(1, average=True))
        assert text == "the job keeps no moving average (its field moving_average)"
        assert (await chief.ask(Keep(1))).message == Parameters(0)
        assert await chief.refused(Read(at=1)) == ("RefusedError", "ps 0 has not kept version 1")
        await t.check(worker, batches)
        assert (await chief.ask(Keep(1))).message == Parameters(1)  # too late, but it was kept
        assert (await chief.ask(Read(at=1))).message == Parameters(1)
        for version in (2, 1):  # one that was sent twice comes late
            await chief.ask(Keep(version))
        await t.check(worker, batches[1:], sequence=2)
        assert (await chief.ask(Read(at=2))).message == Parameters(2)
        chief.generation = 2  # of which nothing is kept
        await chief.ask(Initialize(None))
        assert await chief.refused(Read(at=2)) == ("RefusedError", "ps 0 has not kept version 2")


async def test_push_of_a_left_worker_is_fenced() -> None:
    async with training() as (t, worker, _):
        assert (await worker.ask(Leave("enough"))).message == Done()
        error, text = await worker.refused(PUSH, t.zeros)
        assert (error, text.endswith("has not joined")) == ("FencedError", True)


async def test_waits_without_end_are_cut_and_the_status_stays_readable() -> None:
    async with training() as (t, worker, batches):
        waits = tuple(Wait("worker 0", "ps 0", f"reason {number}", 1.0) for number in range(4000))
        await worker.ask(Heartbeat(waits=waits))
        status = (await t.someone("client").ask(GetStatus())).message
        assert isinstance(status, Status)
        assert len(status.waits) < 40
        await t.check(worker, batches)


@pytest.mark.parametrize(
    "beat",
    [
        Heartbeat(phases_s=(1.0,) * 3),
        Heartbeat(phases_s=(math.nan,) * 6),
        Heartbeat(phases_s=(1e308,) * 6),
        Heartbeat(phases_s=(-1.0,) * 6),
        Heartbeat(waits=(Wait("worker 0", "ps 0", "why", math.inf),)),
        Heartbeat(waits=(Wait("worker 0", "ps 0", "why", 1.0, math.nan),)),
    ],
)
async def test_heartbeat_with_impossible_times_is_refused(beat: Heartbeat) -> None:
    async with training() as (t, worker, batches):
        error, text = await worker.refused(beat)
        assert (error, "expected seconds from 0 on" in text) == ("ProtocolError", True)
        status = (await t.someone("client").ask(GetStatus())).message
        assert isinstance(status, Status)
        assert (status.waits, [task.phases_s for task in status.tasks]) == ((), [(), (), ()])
        await t.check(worker, batches)
