"""A shard whose arithmetic happens elsewhere than in its segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.modules import Modules
from zmqtrain.compute.device import make_device
from zmqtrain.errors import ConfigError
from zmqtrain.optim import SGD, Adam, Flat, Momentum, Rule, Update
from zmqtrain.protocol.orders import Accumulate, Apply, Reduce
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.shard import Shard

SIZE = 100
WORKERS = 3


class Apart:
    """A device whose memory is other memory of the host."""

    def twins(self, flats: Sequence[Flat]) -> list[Any]:
        return [np.full_like(flat, np.nan) for flat in flats]

    def load(self, flats: Sequence[Flat], twins: Sequence[Any]) -> None:
        for flat, twin in zip(flats, twins, strict=True):
            twin[:] = flat

    def wait(self) -> None:
        """Nothing to wait for: :meth:`load` is complete when it returns."""

    def store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> None:
        for twin, flat in zip(twins, flats, strict=True):
            flat[:] = twin

    def begin_store(self, twins: Sequence[Any], flats: Sequence[Flat]) -> Callable[[], None]:
        return partial(self.store, twins, flats)

    def batch(self, arrays: Any) -> Any:
        return arrays


def make_shard(
    update: Update, device: Any = None, size: int = SIZE, shape: tuple[int, ...] | None = None
) -> Shard:
    (layout,) = place([Variable("w", shape or (size,))], 1, partition_nbytes=4 * size)
    shard = Shard(layout, update, device=device)
    shard.initialize(normal(99, size))
    return shard


def normal(seed: int, size: int = SIZE) -> Flat:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def run(shard: Shard, changes: Sequence[tuple[str, Sequence[int]]]) -> None:
    for number, (change, workers) in enumerate(changes):
        for worker in workers:
            shard.segment.gradient(worker)[:] = normal(10 * number + worker, shard.layout.size)
            shard.segment.note_absent(worker, [0] * ((number + worker) % 3 == 2))
            shard.stage(worker, worker)
        if change == "reduce":
            shard.carry_out(Reduce(tuple(workers)))
        elif change == "apply":
            shard.carry_out(Apply(workers[0]))
        else:
            shard.carry_out(Accumulate(workers[0]))


WORKERS_OF = st.lists(st.integers(0, WORKERS - 1), min_size=1, max_size=WORKERS, unique=True)
CHANGES = st.lists(st.tuples(st.sampled_from(["apply", "accumulate", "reduce"]), WORKERS_OF))

every_rule = pytest.mark.parametrize("rule", [SGD(0.1), Momentum(0.1), Adam(0.1)], ids=repr)


@every_rule
@settings(max_examples=50)
@given(changes=CHANGES)
def test_shard_on_a_device_holds_what_one_in_place_holds(
    rule: Rule, changes: list[tuple[str, list[int]]]
) -> None:
    update = Update(rule, moving_average=0.9)
    apart, in_place = make_shard(update, Apart()), make_shard(update)
    for shard in (apart, in_place):
        run(shard, changes)
    assert bits(apart) == bits(in_place)


def bits(shard: Shard) -> tuple[Any, ...]:
    segment = shard.segment
    read_in_place = segment.parameters.tobytes(), segment.slots["average"].tobytes()
    slots = {name: slot.tobytes() for name, slot in shard.slots.items()}
    return shard.version, shard.accumulated, read_in_place, slots


def test_slots_stay_on_the_device_until_they_are_asked_for() -> None:
    shard = make_shard(Update(Momentum(0.1)), Apart())
    run(shard, [("apply", [0])])
    before = shard.segment.slots["momentum"].copy()
    assert not before.any()
    assert shard.slots["momentum"].any()


def test_shard_on_a_device_goes_on_from_what_it_is_given() -> None:
    shard = make_shard(Update(Momentum(0.1)), Apart())
    shard.initialize(normal(1), {"momentum": normal(2)}, version=7)
    shard.segment.gradient(0)[:] = 0
    shard.stage(0, 0)
    shard.carry_out(Apply(0))
    momentum = normal(2) * np.float32(0.9)
    np.testing.assert_array_equal(shard.slots["momentum"], momentum)
    np.testing.assert_array_equal(shard.parameters, normal(1) - momentum * np.float32(0.1))
    assert shard.version == 8


@pytest.mark.parametrize("option", ["--device", "--ps-device"])
def test_gpu_that_is_not_to_be_had_is_told_with_the_option_that_asked(
    option: str, modules: Modules
) -> None:
    modules("cupy", None)
    with pytest.raises(ConfigError, match=f"^{option} needs a GPU, but CuPy is not installed"):
        make_device("gpu", option)
