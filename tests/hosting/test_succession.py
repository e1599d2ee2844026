"""A worker that is asked to hand its part over: what it writes, where, and what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simulation.model import counting_job
from tests.coordination.parts import fail
from zmqtrain.config.cluster import Cluster, Role, Task
from zmqtrain.errors import CheckpointError
from zmqtrain.hosting.succession import Succession
from zmqtrain.planning.plan import plan_for
from zmqtrain.protocol.checkpoint import LastOrders, LedgerState, Saved, ShardFile
from zmqtrain.server.orphaned_shard import GONE, OrphanedShard
from zmqtrain.store.layout import ShardLayout
from zmqtrain.wire.control import HandedOver, HandOver

LAST = LastOrders(1, 1, (), Saved(0, "sync-replicas", LedgerState(0, (), 0)))
FILE = ShardFile(0, "shard-00000.safetensors", 1, "0" * 64, 0)


class Part(OrphanedShard):
    """Shard that ps 1 left behind; it records its writes."""

    def __init__(self, error: CheckpointError | None = None) -> None:
        shard: Any = SimpleNamespace(layout=SimpleNamespace(shard=1))
        super().__init__(shard, LAST, 0)
        self.written: list[tuple[Path, ShardLayout]] = []
        self._error = error

    def write(self, directory: Path, layout: ShardLayout, last: LastOrders) -> ShardFile:
        self.written.append((directory, layout))
        if self._error is not None:
            raise self._error
        return FILE


async def asked(logdir: Path, part: Any, *messages: HandOver) -> list[HandedOver]:
    """Return what worker 1, of three with two copies of each part, answers."""
    cluster = Cluster((), 3, worker_addresses=("a:1", "b:1", "c:1"))
    plan = plan_for(counting_job(3, frozenset(), logdir=str(logdir), copies=2), cluster)
    actor: Any = SimpleNamespace(task=Task(Role.WORKER, 1), crash=fail)
    succession, answers = Succession(actor, plan, part), asyncio.Queue[HandedOver]()
    request: Any = SimpleNamespace(send=answers.put_nowait)
    found = []
    for message in messages:
        succession.on_hand_over(request, message)
        found.append(await answers.get())
    succession.close()
    return found


async def test_part_is_written_once_and_every_request_is_answered(tmp_path: Path) -> None:
    part, message = Part(), HandOver("step-1.tmp-0", (0, 1), LAST)
    answers = await asked(tmp_path, part, message, message)
    assert answers == [HandedOver("step-1.tmp-0", FILE)] * 2
    ((directory, layout),) = part.written
    assert directory == tmp_path / "checkpoints" / "step-1.tmp-0"
    assert layout.shard == 1
    written = {cut.variable.name for cut in layout.slices if not cut.copy}
    held = {cut.variable.name for cut in layout.slices}
    assert written < held  # ps 0 is left, and writes what it owns


async def test_unknown_shards_are_not_left(tmp_path: Path) -> None:
    answers = [await asked(tmp_path, part := Part(), HandOver("d", (0, 1), LAST))]
    answers += [await asked(tmp_path, again := Part(), HandOver("d", (9, 1, 0, -3, 1), LAST))]
    assert answers == [[HandedOver("d", FILE)]] * 2
    assert again.written == part.written


async def test_request_of_another_worker_is_answered_too(tmp_path: Path) -> None:
    messages = [HandOver(f"step-1.tmp-{number}", (1, 2), LAST) for number in (0, 1)]
    answers = await asked(tmp_path, part := Part(), *messages)
    assert [answer.directory for answer in answers] == [each.directory for each in messages]
    assert len(part.written) == 2


@pytest.mark.parametrize("name", ["../../elsewhere", "/elsewhere"])
async def test_part_is_written_only_beside_the_checkpoints(tmp_path: Path, name: str) -> None:
    await asked(tmp_path, part := Part(), HandOver(name, (0, 1), LAST))
    assert [directory for directory, _ in part.written] == [tmp_path / "checkpoints" / "elsewhere"]


@pytest.mark.parametrize(
    ("part", "shards", "reason"),
    [
        (None, (0, 1), GONE),
        (Part(), (0, 2), GONE),  # it is not among them
        (Part(), (1,), GONE),  # part 2 is lost
        (Part(CheckpointError("no space left")), (0, 1), "no space left"),
    ],
)
async def test_refusal_to_hand_over_has_a_reason(
    tmp_path: Path, part: Part | None, shards: tuple[int, ...], reason: str
) -> None:
    assert await asked(tmp_path, part, HandOver("d", shards, LAST)) == [
        HandedOver("d", None, f"worker 1: {reason}")
    ]
