"""Reads of what shards hold, in their segments or by messages, each shard at one version."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqtrain.actors.link import Link
from zmqtrain.compute.arrays import Flat, zeros
from zmqtrain.optim import AVERAGE
from zmqtrain.planning.plan import Plan
from zmqtrain.store.layout import ShardLayout, empty_values
from zmqtrain.store.segment import Reached
from zmqtrain.store.segment_layout import CLOCK, VERSION
from zmqtrain.wire.messages import Parameters, Read

_ATTEMPTS = 8
_YIELD = threading.Event()  # never set: waiting for it frees the core for the ps


async def read_variables(
    plan: Plan,
    links: Sequence[Link],
    segments: Sequence[Reached | None],
    *,
    average: bool = False,
    at: int = 0,
) -> tuple[dict[str, Any], list[int]]:
    """Return all variables, or their moving averages, and the version of each shard.

    ``at``: the version that the shards have kept.
    """
    layouts, job = plan.layouts, plan.job
    flats = [zeros(layout.size) for layout in layouts]
    reading = (
        read_parameters(*each, average=average, at=at)
        for each in zip(links, segments, layouts, flats, strict=True)
    )
    versions = await asyncio.gather(*reading)
    values = empty_values(job.variables())
    for layout, flat in zip(layouts, flats, strict=True):
        layout.scatter(flat, values)
    return values | job.frozen(), versions


async def read_parameters(
    link: Link,
    segment: Reached | None,
    layout: ShardLayout,
    out: Flat,
    *,
    copies: bool = False,
    average: bool = False,
    at: int = 0,
) -> int:
    """Copy the elements that a shard owns, or their moving average, at one version; return it.

    ``out``: array of shape (layout.size,). ``copies``: read copies as well. ``at``: a kept version.
    """
    part = slice(None) if copies else layout.owned
    if segment is not None and not at:
        source = segment.slots[AVERAGE] if average else segment.parameters
        if copy_consistently(segment.words, source[part], out[part]):
            return segment.words[VERSION]
    message = Read(average, copies=copies, at=at)
    reply = await link.request(message, reason="its parameters are read", out=out[part])
    return reply.expect(Parameters).version


def copy_consistently(words: memoryview, source: Flat, out: Flat) -> bool:
    """Copy ``source`` while no update changes it; False if updates did in every attempt.

    A sequence lock: the ps makes the clock odd before an update and even after it. Loads and stores
    keep their order on x86; elsewhere the copy takes far longer than a store may be late.
    """
    for _ in range(_ATTEMPTS):
        before = words[CLOCK]
        if before % 2 == 0:
            np.copyto(out, source)
            if words[CLOCK] == before:
                return True
        else:
            _YIELD.wait(0.0005)
    return False
