"""A job whose shards are updated on a device."""

from __future__ import annotations

from typing import Any

import pytest

import zmqtrain
from tests.store.test_arithmetic import Apart
from zmqtrain import Job
from zmqtrain.optim import Adam


def job(**fields: Any) -> Job:
    from zmqtrain.data import Digits
    from zmqtrain.models import MLP

    return Job(
        model=MLP(features=64, hidden=8, classes=10),
        data=Digits(),
        optimizer=Adam(0.01),
        policy="sync-replicas",
        moving_average=0.9,
        steps=30,
        batch_size=20,
        **fields,
    )


@pytest.mark.parametrize("ps", [1, 2])
def test_job_with_its_shards_on_a_device_gives_the_same_parameters(
    ps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[tuple[str, str]] = []

    def make_device(name: str, option: str) -> Apart:
        devices.append((name, option))
        return Apart()

    monkeypatch.setattr("zmqtrain.server.shard_memory.make_device", make_device)
    in_place = zmqtrain.run(job(), workers=2, ps=ps)
    assert not devices
    apart = zmqtrain.run(job(ps_device="gpu"), workers=2, ps=ps)
    assert devices == [("gpu", "--ps-device")] * ps
    assert apart.parameters_sha256 == in_place.parameters_sha256
    assert apart.accuracy == in_place.accuracy
