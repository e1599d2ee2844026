"""Who pushes by a shortcut: a worker that reaches the ps's segment, and so can tell its name."""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from zmqtrain.actors.link import Link
from zmqtrain.store.segment import Reached, Segment
from zmqtrain.transport.base import HasShortcuts, UnreachableError

if TYPE_CHECKING:
    from zmqtrain.actors.task import JobActor
    from zmqtrain.server.server import ParameterServer

log = logging.getLogger(__name__)


def open_shortcut(ps: ParameterServer, segment: Segment, address: str) -> None:
    """Let workers that reach the segment of a ps, which listens at ``address``, come by a shortcut.

    Not where tasks are known by their keys: there every message has to come with one.
    """
    is_reachable = segment.path is not None and ps.lane != "tcp"
    if not is_reachable or ps.security.is_keyed(address):
        return
    if isinstance(ps.transport, HasShortcuts):
        try:
            ps.serve(ps.transport.offer_shortcut(_name_of(segment.nonce)))
        except UnreachableError as error:
            log.info("workers of this host push by ZeroMQ: %s", error)


def shorten(actor: JobActor, link: Link, segment: Reached) -> None:
    """Have a worker's pushes go by a shortcut to the ps whose segment it has reached."""
    if segment.lane != "shm" or actor.security.is_keyed(link.endpoint.address):
        return
    if isinstance(actor.transport, HasShortcuts):
        link.shortcut.open(partial(actor.transport.take_shortcut, _name_of(segment.nonce)))


def _name_of(nonce: str) -> str:
    """Return a name that tells nothing of the nonce, for every user of the host can see it."""
    return hashlib.blake2b(bytes.fromhex(nonce), digest_size=16).hexdigest()
