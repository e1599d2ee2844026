"""Bits do not depend on how tensors travel: in a message, in one chunk, in several, or not at all.

Sizes are those around which a tensor travels, or is updated, in another way.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.exchanges.conftest import KINDS, OpenExchange, on_ps
from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.optim import Adam
from zmqtrain.store.segment_layout import PART_SIZE, REDO_SIZE
from zmqtrain.training.exchange import StepReport
from zmqtrain.wire.chunks import CHUNK_SIZE, count
from zmqtrain.wire.codec import INLINE_NBYTES

STEPS = 4
INLINE_SIZE = INLINE_NBYTES // 4
EVERY = KINDS | {"1 ps, by messages": partial(on_ps, ps=1, lane="tcp")}


class Vector:
    """Model with one variable, whose gradients the test gives."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __repr__(self) -> str:
        return f"Vector({self._size})"

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"w": np.random.default_rng(seed).random(self._size, np.float32)}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        raise AssertionError("an exchange computes nothing")

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {}


async def trained(size: int, open_exchange: OpenExchange) -> str:
    """Make steps by given gradients; return a digest of the parameters."""
    rows = np.zeros((12, 1), np.float32)
    job = Job(
        model=Vector(size), data=Arrays((rows,), (rows,)), optimizer=Adam(0.01), batch_size=3,
        steps=STEPS + 1, policy="sync-replicas", prefetch=0,
    )  # fmt: skip  # with the answer to a last step no parameters come
    whole = np.empty(size, np.float32)
    async with open_exchange(job) as exchange:
        membership = await exchange.join()
        for batch in range(STEPS):
            gradient = np.random.default_rng(batch).random(size, np.float32) - 0.5
            exchange.begin()
            for layout, flat in zip(membership.layouts, membership.gradients, strict=True):
                flat[...] = layout.flat_of({"w": gradient})
            await exchange.finish(StepReport(batch, 3, 0.5, True))
        for layout, flat in zip(membership.layouts, membership.parameters, strict=True):
            for cut in layout.slices:
                cut.of(whole)[...] = cut.value(flat)
    return hashlib.sha256(whole).hexdigest()


def test_sizes_are_those_at_which_the_way_changes() -> None:
    assert (count(CHUNK_SIZE), count(CHUNK_SIZE + 1)) == (1, 2)
    assert PART_SIZE == 2 * CHUNK_SIZE  # so that both are looked at below


@pytest.mark.parametrize("by", [-1, 0, 1])
@pytest.mark.parametrize("around", [2, INLINE_SIZE, REDO_SIZE, CHUNK_SIZE, 2 * PART_SIZE])
async def test_bits_do_not_depend_on_how_tensors_of_a_size_travel(around: int, by: int) -> None:
    found = {name: await trained(around + by, how) for name, how in EVERY.items()}
    assert found == dict.fromkeys(EVERY, found["local"])
