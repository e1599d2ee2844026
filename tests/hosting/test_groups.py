"""Workers without ps that look for one another: what they take from others, and when they may."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from simulation.model import counting_job
from tests.constants import Constants
from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.task import TaskConfig
from zmqtrain.coordination.group import Group
from zmqtrain.errors import ConfigError, ExitCode, GroupOverError, ProtocolError, ZmqTrainError
from zmqtrain.hosting import groups, task
from zmqtrain.hosting.groups import Gatherer, claim, may_regroup
from zmqtrain.planning.plan import Plan, plan_for
from zmqtrain.store.logdir import claimed, forget_groups, newest_group, write_group
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.wire.codec import Envelope, Sender, decode
from zmqtrain.wire.control import Gather

MEMBERS = ("a:1", "b:1", "c:1")
CONFIG = TaskConfig(role=Role.WORKER, job="j", ps="0", worker_addresses=MEMBERS, workers=3)
CLUSTER = CONFIG.cluster
JOB = counting_job(3, frozenset(), logdir="somewhere")
PLAN = plan_for(JOB, CLUSTER)
FIRST = Group(1, (0, 1, 2))


@pytest.mark.parametrize(
    ("cluster", "index", "may"),
    [
        ({}, 0, True),
        ({"chief": True}, 0, False),
        ({"worker_addresses": ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")}, 0, False),  # a board
        ({"ps": ("d:1",)}, 0, False),
        ({}, 3, False),
        ({"worker_addresses": ("ipc://a", "ipc://b", "ipc://c")}, 0, False),
    ],
)
def test_only_workers_on_separate_hosts_regroup(
    cluster: dict[str, Any], index: int, may: bool
) -> None:
    config = CONFIG.of(Task(Role.WORKER, index))
    assert may_regroup(config, plan_for(JOB, replace(CLUSTER, **cluster))) is may
    without = counting_job(3, frozenset())
    assert not may_regroup(config, plan_for(without, replace(CLUSTER, **cluster)))


def test_join_timeout_below_the_peer_timeout_is_refused() -> None:
    config = CONFIG.model_copy(update={"join_timeout_s": 20.0})
    assert may_regroup(config.model_copy(update={"peer_timeout_s": 20.0}), PLAN)
    with pytest.raises(ConfigError, match=r"--join-timeout-s .* is 20 and .* is 60; .* raise it"):
        may_regroup(config, PLAN)


def plan_of(logdir: Path, *addresses: str) -> Plan:
    members = addresses or MEMBERS
    cluster = replace(CLUSTER, worker_addresses=members, workers=len(members))
    return plan_for(JOB.model_copy(update={"logdir": str(logdir)}), cluster, lane="tcp")


def hear(gatherer: Gatherer, role: str, index: int, message: Gather) -> None:
    end = gatherer.transport.connect("memory://x")
    request = Request(gatherer, end, b"", Envelope(message, Sender(role, index), 0))
    gatherer.on_gather(request, message)


@pytest.mark.parametrize(("sender", "members"), [(1, ()), (1, (0, 3)), (1, (-1, 0)), (3, (0, 1))])
async def test_group_of_unknown_workers_is_refused(sender: int, members: tuple[int, ...]) -> None:
    gatherer = Gatherer(CONFIG, PLAN, MemoryTransport(), FIRST)
    with pytest.raises(ProtocolError):
        hear(gatherer, "worker", sender, Gather(2, members))
    assert gatherer.found is None


ON, OVER, LATER = Gather(3, (1, 2, 0)), Gather(3, (1, 2, 0), gives_up=True), Gather(4, (1, 2))


@pytest.mark.parametrize(
    ("heard", "goes_on"),
    [
        ([("ps", 0, ON)], False),
        ([("ps", 0, ON), ("ps", 0, ON)], False),
        ([("ps", 0, ON), ("ps", 1, ON)], True),
        ([("ps", 0, ON), ("worker", 1, OVER), ("ps", 1, ON)], False),
        ([("ps", 0, ON), ("worker", 0, OVER), ("ps", 1, ON)], True),  # it has no part
        ([("ps", 0, LATER)], True),
    ],
)
async def test_worker_without_a_part_goes_back_once_all_parts_go_on(
    heard: list[tuple[str, int, Gather]], goes_on: bool
) -> None:
    job = JOB.with_overrides(partition_nbytes=sum(v.nbytes for v in JOB.variables()) // 2)
    plan = plan_for(job, CLUSTER)
    assert plan.shards == 2
    gatherer = Gatherer(CONFIG, plan, MemoryTransport(), Group(3, ON.members))
    for role, index, message in heard:
        hear(gatherer, role, index, message)
    assert gatherer.found == (Group(heard[-1][2].group, heard[-1][2].members) if goes_on else None)


@pytest.mark.parametrize("hears", [(), (0,), (2,)])
async def test_worker_that_is_not_heard_is_answered_at_once(hears: tuple[int, ...]) -> None:
    """The worker's own connection to it may take longer."""
    gatherer = Gatherer(CONFIG, PLAN, MemoryTransport(), FIRST)
    end, message = Mock(), Gather(1, (0, 1, 2), True, hears)
    envelope = Envelope(message, Sender("worker", 1), 0)
    gatherer.on_gather(Request(gatherer, end, b"", envelope), message)
    told = [decode(call.args[0]).message for call in end.send.call_args_list]
    assert told == ([] if 0 in hears else [Gather(1, (0, 1, 2), True, (1,))])


async def test_workers_that_find_one_another_do_not_wait_for_a_heartbeat(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    transport, plan = MemoryTransport(), plan_of(tmp_path, "ipc://a", "ipc://b")
    slow = CONFIG.model_copy(update={"heartbeat_s": 3600.0, "lease_s": 7200.0})
    gatherers = [
        Gatherer(slow.of(Task(Role.WORKER, index)), plan, transport, Group(1, (0, 1)))
        for index in range(2)
    ]
    running = [asyncio.ensure_future(gatherer.run()) for gatherer in gatherers]
    await asyncio.wait_for(running[0], 20)
    assert gatherers[0].found == Group(2, (0, 1))
    gatherers[1].stop(ExitCode.TERMINATED)
    assert await asyncio.wait_for(running[1], 20) == ExitCode.TERMINATED


async def test_logdir_that_cannot_be_written_for_a_moment_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CONFIG.model_copy(update={"insecure": True, "heartbeat_s": 0.01, "lease_s": 0.02})
    gatherer = Gatherer(config, plan_of(tmp_path), MemoryTransport(), Group(1, (0,)))
    running = asyncio.ensure_future(gatherer.run())
    while "trying again" not in caplog.text and not running.done():
        await asyncio.wait([running], timeout=0.01)
    (tmp_path / "checkpoints").mkdir()
    await asyncio.wait_for(running, 20)
    assert gatherer.found == Group(2, (0,))


async def test_signal_ends_the_wait_for_the_claim_of_a_dead_host(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"metrics_port": 0, "insecure": True})
    plan = plan_of(tmp_path).in_group(2, (0, 1))
    loop = asyncio.get_running_loop()
    has_run = asyncio.Event()

    async def run() -> None:
        has_run.set()

    def on_start(actor: JobActor) -> None:
        actor.add_background_task(run)
        loop.call_soon(actor.stop, int(ExitCode.TERMINATED))

    with claimed(plan.job.logdir):
        serving = task.serve_in_group(config, plan, on_start, [], lambda status: None, None)
        assert await asyncio.wait_for(serving, config.peer_timeout_s / 2) == ExitCode.TERMINATED
    assert not has_run.is_set()  # a chief would end the job of the one that has the claim


class Chief(JobActor):
    """Waits to be stopped."""

    async def main(self) -> int:
        await self.stopping.wait()
        return self.stop_code


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(
    ("error", "of_link"), [(GroupOverError("it is over"), True), (ConfigError("lr is -1"), False)]
)
async def test_group_that_is_over_drops_unsent_messages(
    group: int, error: ZmqTrainError, of_link: bool
) -> None:
    """To a host that is lost it would wait in vain, and keep the process from the next group."""
    actor = Chief(CONFIG, replace(PLAN, group=group), MemoryTransport())
    running = asyncio.ensure_future(actor.run())
    await asyncio.sleep(0)
    ends: list[Any] = [actor.listen("a"), actor.link(Task(Role.PS, 0), "a").endpoint]
    actor.links[0].joined = True
    async with asyncio.timeout(20):
        while not actor.links[0].is_alive:  # it has an answer to a heartbeat
            await asyncio.wait([running], timeout=0.01)
    for end in ends:
        end.close = Mock(wraps=end.close)
    actor.crash(error)
    with pytest.raises(type(error)):
        await asyncio.wait_for(running, 20)
    discarded = [end.close.call_args_list[0].kwargs["discard"] for end in ends]
    assert discarded == [group > 0, group > 0 and of_link]


async def test_chief_gives_its_claim_up_to_that_of_a_later_group(
    tmp_path: Path, constants: Constants
) -> None:
    constants(groups, CLAIM_S=0.01)
    plan = plan_of(tmp_path)
    chiefs = [
        Chief(CONFIG, plan.in_group(number, members), MemoryTransport())
        for number, members in ((1, (0, 1, 2)), (2, (1, 2)))
    ]
    with contextlib.ExitStack() as of_first, contextlib.ExitStack() as of_second:
        await claim(of_first, chiefs[0])
        running = asyncio.ensure_future(chiefs[0].run())
        claiming = asyncio.ensure_future(claim(of_second, chiefs[1]))
        write_group(str(tmp_path), 2, MEMBERS[1:])
        with pytest.raises(GroupOverError, match="group 2 of workers carries the job"):
            await asyncio.wait_for(running, 20)
        assert not claiming.done()
        of_first.close()
        await asyncio.wait_for(claiming, 20)


def test_first_group_that_is_written_counts_until_the_job_has_ended(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    logdir = str(tmp_path)
    assert newest_group(logdir) == (0, ())
    write_group(logdir, 2, ["a:1", "b:1"])
    write_group(logdir, 2, ["b:1", "c:1"])
    assert newest_group(logdir) == (2, ("a:1", "b:1"))
    write_group(logdir, 10, ["b:1"])
    assert newest_group(logdir) == (10, ("b:1",))
    forget_groups(logdir)
    assert [*(tmp_path / "checkpoints").iterdir()] == []
