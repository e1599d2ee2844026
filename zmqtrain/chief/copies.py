"""How the chief saves the parameters of ps that lost their memory, where others hold copies.

Until all ps begin the next generation, those that are left carry out no order. They become equal by
the last orders that one of them knows, and write a checkpoint, so that no acknowledged update is
lost. `hosting/succession.py` does the same if a holder does not come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from zmqtrain.actors.joining import Admission
from zmqtrain.actors.task import JobActor
from zmqtrain.chief.saving import Saver
from zmqtrain.coordination.hand_over import agreed
from zmqtrain.errors import CheckpointError
from zmqtrain.protocol.checkpoint import LastOrders, Saved, ShardFile
from zmqtrain.wire.codec import Envelope
from zmqtrain.wire.messages import EndGeneration, HandedOver, HandOver, Message

log = logging.getLogger(__name__)


async def save_copies(chief: JobActor, loss: str, joined: Sequence[Admission]) -> bool:
    """Save what the ps of the last generation hold together; return False if they cannot.

    ``loss``: what has happened, for the log. ``joined``: the welcomes of all ps.

    Raises:
        FencedError: one of these ps was restarted, too.
        PeerLostError: one of them was given up.
    """
    if not chief.plan.hands_over:
        return False
    try:
        step = await _save(chief, joined)
    except CheckpointError as error:
        log.warning("%s, and the copies of others cannot replace them: %s", loss, error)
        return False
    log.warning("%s: the job goes on at step %d with copies, without a step lost", loss, step)
    return True


async def _save(chief: JobActor, joined: Sequence[Admission]) -> int:
    generation = max(one.generation for one in joined)
    left = {shard: one for shard, one in enumerate(joined) if one.generation == generation}

    async def ask(message: Message, shards: Iterable[int], reason: str) -> dict[int, Envelope]:
        links = {shard: left[shard].link for shard in shards}
        asked = (link.request(message, reason=reason) for link in links.values())
        return dict(zip(links, await asyncio.gather(*asked), strict=True))

    replies = await ask(EndGeneration(generation), left, "it carries out its last orders")
    known = {shard: reply.expect(LastOrders) for shard, reply in replies.items()}
    names = [one.link.peer for one in joined]
    last, saved, layouts = agreed(chief.plan.layouts, known, names)

    async def write(directory: Path) -> Saved:
        message = HandOver(directory.name, tuple(layouts), last)
        replies = await ask(message, layouts, "it writes its part of what is left")
        return replace(saved, files=tuple(map(_file, replies.values())))

    saver = Saver(chief.job, [*layouts.values()], chief.fingerprint, chief.metrics, write)
    await saver.save(saved.step, generation)
    return saved.step


def _file(reply: Envelope) -> ShardFile:
    answer = reply.expect(HandedOver)
    if answer.file is None:
        raise CheckpointError(f"{reply.sender}: {answer.reason}")
    return answer.file
