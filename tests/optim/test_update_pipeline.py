"""L2 before the rule and the moving average behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from zmqtrain.compute.arrays import BLOCK_SIZE
from zmqtrain.errors import ConfigError
from zmqtrain.optim import SGD, Adam, Flat, Slot, Update, new_slots


@dataclass(frozen=True)
class Assign:
    """A rule of a third party: the gradient becomes the parameter."""

    slot: str = "seen"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot(self.slot, 0.0),)

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        parameters[...] = gradient
        slots[self.slot][...] = step


def ones(size: int = 1) -> Flat:
    return np.ones(size, np.float32)


def test_update_without_options_is_the_rule_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal(1000, np.float32)
    wrapped = plain.copy()
    slots, wrapped_slots = new_slots(Adam(), plain), new_slots(Update(Adam()), wrapped)
    for step in range(3):
        gradient = rng.standard_normal(1000, np.float32)
        Adam().update(plain, gradient, slots, step)
        Update(Adam()).update(wrapped, gradient, wrapped_slots, step)
    assert plain.tobytes() == wrapped.tobytes()
    assert slots.keys() == wrapped_slots.keys()


def test_l2_adds_l2_times_the_parameter_to_the_gradient() -> None:
    w = np.array([2.0, -4.0], np.float32)
    Update(SGD(0.1), l2=0.5).update(w, ones(2), {}, step=0)
    # 2 - 0.1 * (1 + 0.5 * 2) and -4 - 0.1 * (1 - 0.5 * 4)
    np.testing.assert_allclose(w, [1.8, -3.9], rtol=1e-6)


@pytest.mark.parametrize(
    ("updates", "decay"),
    [(1, 2 / 11), (2, 3 / 12), (79, 80 / 89), (80, 0.9), (81, 0.9), (10**6, 0.9)],
)
def test_average_decay_grows_with_the_updates_up_to_its_limit(updates: int, decay: float) -> None:
    update = Update(SGD(1.0), moving_average=0.9)
    slots = {"average": ones()}
    update.update(ones(), ones(), slots, step=updates - 1)
    assert slots["average"][0] == pytest.approx(decay, rel=1e-6)


def test_rule_of_a_third_party_gets_gradient_step_and_slots_of_every_run() -> None:
    size = BLOCK_SIZE + 5
    w = ones(size)
    update = Update(Assign(), l2=2.0, moving_average=0.0)
    slots = new_slots(update, w)
    gradient = np.arange(size, dtype=np.float32)
    update.update(w, gradient, slots, step=7)
    np.testing.assert_array_equal(w, gradient + 2)
    assert (slots["seen"] == 7).all()
    np.testing.assert_array_equal(slots["average"], w)


def test_update_inside_an_update_adds_both_penalties() -> None:
    w = np.full(BLOCK_SIZE + 1, 2.0, np.float32)
    Update(Update(SGD(1.0), l2=0.25), l2=0.5).update(w, ones(len(w)), {}, step=0)
    np.testing.assert_allclose(w, 2 - (1 + 0.75 * 2), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"rule": SGD}, "Update: rule is <class 'zmqtrain.optim.rules.SGD'>; expected an update"),
        ({"rule": 0.01}, "Update: rule is 0.01; expected an update rule"),
        ({"rule": SGD(), "l2": -1.0}, "Update: l2 is -1.0; expected a finite number of at least 0"),
        ({"rule": SGD(), "moving_average": 1.0}, "Update: moving_average is 1.0; expected a num"),
        (
            {"rule": Assign(slot="average"), "moving_average": 0.9},
            r"Update: Assign\(slot='average'\) already has a slot 'average'",
        ),
    ],
)
def test_update_with_impossible_argument_is_refused(
    arguments: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{complaint}"):
        Update(**arguments)


def test_slot_called_average_without_moving_average_is_the_rules_own() -> None:
    assert Update(Assign(slot="average")).slots == (Slot("average", 0.0),)
