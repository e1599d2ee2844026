"""Workers without ps that look for one another: what they take from others, and when they may."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.model import counting_job
from zmqtrain.actors.actor import Request
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.coordination.group import Group
from zmqtrain.errors import ProtocolError
from zmqtrain.roles.regroup import Gatherer, may_regroup
from zmqtrain.store.logdir import forget_groups, newest_group, write_group
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import Gather

MEMBERS = ("a:1", "b:1", "c:1")
CONFIG = TaskConfig(
    role=Role.WORKER, job="j", ps=MEMBERS, members=MEMBERS, workers=3, hosted=True, chief=False
)
JOB = counting_job(3, frozenset(), logdir="somewhere")


@pytest.mark.parametrize(
    ("config", "may"),
    [
        ({}, True),
        ({"chief": True}, False),
        ({"board": True}, False),
        ({"hosted": False}, False),
        ({"index": 3}, False),
        ({"members": ("ipc://a", "ipc://b", "ipc://c")}, False),
    ],
)
def test_only_workers_on_hosts_of_their_own_do_without_one(
    config: dict[str, object], may: bool
) -> None:
    assert may_regroup(CONFIG.model_copy(update=config), JOB) is may
    assert not may_regroup(CONFIG, JOB.with_overrides(steps=1).model_copy(update={"logdir": None}))


@pytest.mark.parametrize(("sender", "members"), [(1, ()), (1, (0, 3)), (1, (-1, 0)), (3, (0, 1))])
async def test_group_of_workers_that_are_not_there_is_refused(
    sender: int, members: tuple[int, ...]
) -> None:
    config = CONFIG.in_group(1, (0, 1, 2), 3)
    gatherer = Gatherer(config, JOB, MemoryTransport(), Group(1, (0, 1, 2)))
    message = Gather(2, members)
    end = gatherer.transport.connect("memory://x")
    request = Request(gatherer, end, b"", Envelope(message, Sender("worker", sender), 0))
    with pytest.raises(ProtocolError):
        gatherer.on_gather(request, message)
    assert gatherer.found is None


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
