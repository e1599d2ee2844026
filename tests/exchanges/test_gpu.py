"""A worker on a GPU: its gradients come through every exchange as they are, early or at the end."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

from tests.chunk_sizes import chunks_of
from tests.cupy_stand_in import installed
from tests.exchanges.conftest import OpenExchange
from zmqtrain import Job
from zmqtrain.compute.device import Cpu, Device, Gpu
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.data import Digits
from zmqtrain.models import MLP
from zmqtrain.optim import SGD
from zmqtrain.training.exchange import Exchange
from zmqtrain.training.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in needs Linux")

BATCHES = [
    (random.random((20, 64), np.float32), random.integers(0, 10, 20))
    for random in map(np.random.default_rng, range(4))
]


async def train(job: Job, exchange: Exchange, device: Device) -> list[Any]:
    """Return the parameters after each step, by shard."""
    membership = await exchange.join()
    runner = ModelRunner(job, device, ThreadTeam(1), exchange.written)
    runner.bind(membership)
    found, batch = [], membership.batches[0]
    for arrays in BATCHES:
        exchange.begin()
        runner.load_parameters()
        report = await asyncio.to_thread(runner.compute, runner.place(arrays), batch, 20)
        assert report.finite
        result = await exchange.finish(report)
        batch = result.batches[0]
        found.append([flat.copy() for flat in membership.parameters])
    return found


@pytest.mark.parametrize("overlap", [False, True])
async def test_worker_on_a_gpu_comes_to_the_parameters_of_one_on_the_cpu(
    overlap: bool, open_exchange: OpenExchange
) -> None:
    """Each shard's gradient is large enough to be pinned, and has several chunks."""
    model = MLP(64, 800, 10)
    job = Job(
        model=model, data=Digits(), optimizer=SGD(0.1), batch_size=20, steps=9, overlap=overlap
    )
    with chunks_of(5000):
        async with open_exchange(job) as exchange:
            on_cpu = await train(job, exchange, Cpu())
        with installed(1):
            async with open_exchange(job) as exchange:
                on_gpu = await train(job, exchange, Gpu("--device"))
    for there, here in zip(on_gpu, on_cpu, strict=True):
        for found, expected in zip(there, here, strict=True):
            np.testing.assert_allclose(found, expected, 1e-4, 1e-6)
