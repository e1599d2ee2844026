"""Saving the parameters of a lost ps from the copies that others hold.

The ps that are left carry out no more orders. They become equal by the last ones that any of them
knows, and write a checkpoint together, so that no acknowledged update is lost. The chief has them
do so if a ps begins a new life without its memory, the next group of workers if one stays away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zmqtrain.actors.joining import Admission
from zmqtrain.actors.task import JobActor
from zmqtrain.chief.saving import Saver
from zmqtrain.coordination.hand_over import agreed
from zmqtrain.errors import CheckpointError
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.checkpoint import LastOrders, Saved, ShardFile
from zmqtrain.wire.codec import Envelope
from zmqtrain.wire.control import EndGeneration, HandedOver, HandOver
from zmqtrain.wire.messages import Message

log = logging.getLogger(__name__)

Collect = Callable[[HandOver], Awaitable[Sequence[HandedOver]]]


async def save_left(
    actor: JobActor, plan: Plan, known: Mapping[int, LastOrders], collect: Collect
) -> int:
    """Save a checkpoint from the shards of some ps, and return its step.

    ``known``: the last orders of each, by its shard. ``collect`` returns the answers of the ps.

    Raises:
        CheckpointError: it is not enough, or cannot be written.
    """
    last, saved, layouts = agreed(plan, known)

    async def write(directory: Path) -> Saved:
        answers = await collect(HandOver(directory.name, tuple(layouts), last))
        return replace(saved, files=tuple(map(_file, answers)))

    job = plan.job.model_copy(update={"upload": None})  # its chief's checkpoints are uploaded
    saver = Saver(job, [*layouts.values()], actor.fingerprint, actor.metrics, write)
    await saver.save(saved.step, last.generation)
    return saved.step


def _file(answer: HandedOver) -> ShardFile:
    if answer.file is None:
        raise CheckpointError(answer.reason)
    return answer.file


async def save_copies(chief: JobActor, loss: str, joined: Sequence[Admission]) -> bool:
    """Save a checkpoint from the ps of the last generation; return False if they cannot.

    ``loss``: what has happened, for the log. ``joined``: the welcomes of all ps.
    """
    generation = max(one.generation for one in joined)
    links = {at: one.link for at, one in enumerate(joined) if one.generation == generation}

    async def ask(message: Message, shards: Iterable[int]) -> list[Envelope]:
        asked = (links[at].request(message, reason="it saves copies") for at in shards)
        return await asyncio.gather(*asked)

    async def collect(message: HandOver) -> list[HandedOver]:
        return [reply.expect(HandedOver) for reply in await ask(message, message.shards)]

    try:
        replies = await ask(EndGeneration(generation), links)
        known = {at: reply.expect(LastOrders) for at, reply in zip(links, replies, strict=True)}
        step = await save_left(chief, chief.plan, known, collect)
    except CheckpointError as error:
        log.warning("%s, and the copies of others cannot replace them: %s", loss, error)
        return False
    log.warning("%s: the job goes on at step %d with copies, without a step lost", loss, step)
    return True
