"""Joining a ps, which may start later than the task that joins it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zmqtrain.actors.link import Link
from zmqtrain.actors.process_identity import process_identity
from zmqtrain.errors import FencedError, RefusedError
from zmqtrain.wire.messages import Join, Welcome

if TYPE_CHECKING:
    from zmqtrain.actors.task import JobActor


@dataclass(frozen=True, slots=True)
class Admission:
    """A ps's welcome to a task that joined."""

    link: Link
    welcome: Welcome
    generation: int


async def join_all(actor: JobActor, links: Sequence[Link]) -> list[Admission]:
    """Begin a new life at every ps; return their welcomes.

    The leader assigns the incarnation; joins at the other ps carry it.
    """
    actor.abandon_life(FencedError("a new life of this task begins"))
    actor.begin_life()
    for link in links:  # before any join: a refused heartbeat on a later link would end this life
        link.begin_life()
    admissions: list[Admission] = []
    for link in links:
        admissions.append(await join(actor, link))
        actor.incarnation = admissions[-1].welcome.incarnation
    return admissions


async def join(actor: JobActor, link: Link) -> Admission:
    """Join at one ps; wait for it if it has not started yet.

    Raises:
        RefusedError: it runs another job, is another ps, or the task's index is taken.
        PeerLostError: it did not answer within the join timeout.
    """
    link.begin_life()
    message = Join(
        nonce=actor.nonce,
        fingerprint=actor.fingerprint,
        process=actor.process,
        metrics=actor.metrics_address,
        process_identity=process_identity(),
        after=actor.last_incarnation,
        group=actor.plan.group,
    )
    host = actor.waits.hosts.get(link.peer, link.peer)
    envelope = await link.request(
        message,
        reason=f"{host} at {link.endpoint.address} has not answered the join yet"
        f"{actor.plan.remedy}",
        timeout_s=actor.timing.join_timeout_s,
    )
    welcome = envelope.expect(Welcome)
    if str(envelope.sender) != link.peer:
        raise RefusedError(
            f"{envelope.sender} answers at {link.endpoint.address}, where this task expects "
            f"{link.peer}: list the ps in the same order on every task (--ps, TF_CONFIG)"
        )
    link.joined, link.fenced = True, False
    actor.known_generation = max(actor.known_generation, envelope.generation)
    link.window_nbytes = welcome.window_nbytes
    return Admission(link, welcome, envelope.generation)
