"""Options of the optimizer by patterns of names: each variable is updated as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from zmqtrain import Job
from zmqtrain.data import Digits
from zmqtrain.errors import ConfigError
from zmqtrain.models import MLP
from zmqtrain.optim import (
    LAMB,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Exponential,
    Flat,
    Ftrl,
    Lion,
    Mean,
    Momentum,
    Piecewise,
    RMSProp,
    Rule,
    Slot,
    Update,
    new_slots,
)
from zmqtrain.optim.formula import approach
from zmqtrain.optim.schedules import rate_at
from zmqtrain.planning.job_fingerprint import job_fingerprint
from zmqtrain.protocol.orders import Accumulate, Reduce
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.shard import Shard

VARIABLES = [
    Variable("first.kernel", (700,)),
    Variable("first.bias", (7,)),
    Variable("second.kernel", (90, 5)),
    Variable("second.bias", (5,)),
]
OTHERS: dict[str, Any] = {"learning_rate": Exponential(0.5, 10, 0.5), "l2": 0.3}

# Each rule, and the options of its biases.
RULES: list[tuple[Rule, dict[str, Any]]] = [
    (SGD(0.1), OTHERS),
    (Momentum(0.1), OTHERS | {"nesterov": True}),
    (Adagrad(0.1), OTHERS | {"epsilon": 0.1}),
    (RMSProp(0.1, momentum=0.5), OTHERS | {"rho": 0.3}),
    (Adam(0.1), OTHERS | {"beta2": 0.5}),
    (AdamW(0.1, weight_decay=0.5), OTHERS | {"weight_decay": 0.0}),
    (LAMB(0.1, weight_decay=0.5), OTHERS | {"weight_decay": 0.0}),
    (Lion(0.1, weight_decay=0.5), OTHERS | {"weight_decay": 0.0}),
    (Adafactor(0.1, factored=False), OTHERS | {"clip": 0.5}),
    (Ftrl(0.1), {"l1": 0.4, "l2": 0.3}),
    (Adagrad(0.1), {"initial_accumulator": 0.5}),
    (AdamW(0.1), {"optimizer": Momentum(0.1), "momentum": 0.5, "l2": 0.3}),
    (SGD(0.1), {"optimizer": AdamW(0.1, amsgrad=True)}),
    (LAMB(0.1), {"optimizer": Adam(0.1)}),
    (RMSProp(0.1, momentum=0.5), {"optimizer": LAMB(0.1)}),
]


def normal(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {v.name: random.standard_normal(v.shape, np.float32) for v in VARIABLES}


ABSENT: dict[str, list[tuple[bool, bool]]] = {
    "first.kernel": [(False, False), (True, True), (True, True), (False, True), (True, True)],
    "first.bias": [(True, True)] * 3 + [(False, False)] * 2,
    "second.bias": [(True, False), (False, True), (True, True), (False, False), (False, False)],
}
"""Whether the gradients of two workers lack a variable, for each update."""


class Custom:
    """A rule of the user's own that uses the step."""

    slots = (Slot("v", 0.0),)

    def update(self, parameters: Flat, gradient: Flat, slots: Any, step: int) -> None:
        slots["v"] += gradient * np.float32(1 / (step + 1))
        parameters -= slots["v"]


@pytest.mark.parametrize("where", ["private", "crash-safe", "NumPy"])
@pytest.mark.parametrize(
    ("rule", "options"), [*RULES, (Custom(), {"l2": 0.3})], ids=lambda given: type(given).__name__
)
def test_variable_without_a_gradient_is_as_if_there_were_no_such_update(
    rule: Rule, options: dict[str, Any], where: str
) -> None:
    """But the learning rate follows the version, and each variable has its group's options."""
    groups = {"second.bias": {}, "*.bias": options}
    update = Update(rule, 0.1, 0.9, groups=groups, fused=where != "NumPy")
    pushed = [[normal(10 * version + worker) for worker in (0, 1)] for version in range(5)]
    for version, worker in product(range(5), (0, 1)):
        for name, lacks in ABSENT.items():
            pushed[version][worker][name][...] *= not lacks[version][worker]
    for layout in place(VARIABLES, 2, partition_nbytes=0):
        shard = Shard(layout, update, threads=2, safe=where == "crash-safe")
        shard.initialize(layout.flat_of(normal(7)))
        for version, gradients in enumerate(pushed):
            for worker, gradient in enumerate(gradients):
                names = [name for name, lacks in ABSENT.items() if lacks[version][worker]]
                layout.gather(gradient, shard.segment.gradient(worker))
                shard.segment.note_absent(worker, layout.numbers_of(names))
                shard.stage(worker, worker)
            shard.carry_out(Accumulate(0))
            shard.carry_out(Reduce((1,)))
        for cut in layout.slices:
            name = cut.variable.name
            w, slots = _alone(update, name, [[each[name] for each in both] for both in pushed])
            assert cut.run(shard.parameters).tobytes() == w.tobytes(), name
            for slot, values in slots.items():
                assert cut.run(shard.slots[slot]).tobytes() == values.tobytes(), (name, slot)


def _alone(update: Update, name: str, pushed: list[list[Flat]]) -> tuple[Flat, dict[str, Flat]]:
    """Return a variable and its slots after the updates in which it has a gradient."""
    of_group: Any = update.by_group()[2 * (name == "first.bias")]
    w = normal(7)[name].reshape(-1)
    slots, number = new_slots(of_group, w), 0
    for version, both in enumerate(pushed):
        if name in ABSENT and all(ABSENT[name][version]):
            continue
        alone = of_group
        if hasattr(alone.rule, "learning_rate"):
            rate = rate_at(alone.rule.learning_rate, version)
            alone = replace(alone, rule=replace(alone.rule, learning_rate=rate))
        before = slots["average"].copy()
        alone.bind(w, slots).apply(Mean([each.reshape(-1) for each in both], 2), number)
        share = np.float32(1 - min(0.9, (2 + version) / (11 + version)))
        slots["average"][:] = approach(before, w, share)
        number += 1
    return w, slots


@pytest.mark.parametrize(
    "groups",
    [
        {"*.bias": {"weight_decay": -1.0}},
        {"*.bias": {"momentum": 0.5}},
        {"*.bias": {"learning_rate": "high"}},
        {"*.bias": {"l2": -1.0}},
        {"*.bias": {"optimizer": 0.1}},
        {"*.bias": {"optimizer": SGD(0.1), "weight_decay": 0.1}},
        {"*.bias": 0.1},
        {1: {}},
        [("*.bias", {})],
    ],
)
def test_options_that_the_rule_has_not_are_refused(groups: Any) -> None:
    with pytest.raises(ConfigError):
        Job(model=MLP(64, 8, 10), data=Digits(), optimizer=AdamW(0.1), groups=groups)


def test_tasks_of_other_groups_have_another_fingerprint() -> None:
    job = Job(model=MLP(64, 8, 10), data=Digits(), optimizer=AdamW(0.1))
    other = job.with_overrides(groups={"*": {"weight_decay": 0.0}})
    assert job_fingerprint(job)["optimizer"] != job_fingerprint(other)["optimizer"]
    assert "groups" not in job_fingerprint(job)["optimizer"]


def test_rate_that_one_group_refuses_changes_no_other() -> None:
    ends = {"learning_rate": Piecewise((0,), (0.1, 0.0))}
    (layout,) = place(VARIABLES, 1)
    shard = Shard(layout, Update(Ftrl(0.1), groups={"*.bias": ends}), threads=1)
    shard.initialize(layout.flat_of(normal(7)))
    layout.gather(normal(0), shard.segment.gradient(0))
    shard.stage(0, 0)
    shard.carry_out(Reduce((0,)))
    before = shard.parameters.tobytes()
    shard.stage(0, 0)
    with pytest.raises(ConfigError, match="the learning rate is 0 at step 1"):
        shard.carry_out(Reduce((0,)))
    assert shard.parameters.tobytes() == before


def test_rate_of_a_callback_leaves_that_of_a_groups_own_optimizer() -> None:
    (layout,) = place(VARIABLES, 1)
    shard = Shard(layout, Update(Adam(0.1), groups={"*.bias": {"optimizer": SGD(0.1)}}))
    shard.initialize(layout.flat_of(normal(7)))
    shard.learning_rate = 0.0
    layout.gather(normal(0), shard.segment.gradient(0))
    shard.stage(0, 0)
    shard.carry_out(Reduce((0,)))
    for cut in layout.slices:
        before = normal(7)[cut.variable.name].reshape(-1)
        moved = bool((cut.run(shard.parameters) != before).any())
        assert moved == cut.variable.name.endswith("bias")
