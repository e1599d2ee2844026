"""A shard's arithmetic: gradients added up, reduced to one update, and looked at for NaN."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp
from typing import Any

import numpy as np
import pytest

from tests.store.conftest import CutParts
from zmqtrain.optim import LAMB, Adafactor, Adam, Flat, LayerRule, Muon, Update, new_slots
from zmqtrain.protocol.orders import Accumulate, Apply, Reduce
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place, with_copies
from zmqtrain.store.shard import Shard

ROWS = 1001


def gradient(worker: int) -> Flat:
    return np.random.default_rng(worker).standard_normal(ROWS, np.float32)


def shards(ps: int, **options: Any) -> list[Shard]:
    """Return the shards of one variable of ROWS elements, all ones, cut over ``ps`` servers."""
    layouts = place([Variable("w", (ROWS,))], ps, partition_nbytes=4 * ROWS // ps)
    update = Update(Adam(0.1), moving_average=0.9, **options)
    made = [Shard(layout, update) for layout in layouts]
    for shard in made:
        shard.initialize(np.ones(shard.layout.size, np.float32))
    return made


def push(shard: Shard, worker: int, examples: int = 1) -> None:
    shard.layout.gather({"w": gradient(worker)}, shard.segment.gradient(worker))
    shard.stage(worker, worker, weight=examples)


def whole(made: list[Shard]) -> bytes:
    """Return the variable that these shards hold parts of."""
    values = {"w": np.empty(ROWS, np.float32)}
    for shard in made:
        shard.layout.scatter(shard.parameters, values)
    return values["w"].tobytes()


@pytest.mark.parametrize("rounds", [(), (4,), (3, 2), (5, 5, 5)])
def test_corrections_of_moments_do_not_count_steps_that_workers_make_alone(
    rounds: tuple[int, ...],
) -> None:
    (layout,) = place([Variable("w", (ROWS,))], 1)
    shard, plain = (Shard(layout, Update(Adam(0.1))) for _ in range(2))
    for made in (shard, plain):
        made.initialize(np.ones(layout.size, np.float32))
        push(made, 0)
        made.carry_out(Apply(0))
    for steps in rounds:
        shard.segment.gradient(1)[:] = shard.parameters
        shard.stage(1, 1)
        shard.carry_out(Reduce((1,), local_steps=steps))
    for made in (shard, plain):
        made.carry_out(Apply(0))
    assert whole([shard]) == whole([plain])
    assert shard.version == plain.version + sum(rounds)
    assert shard.dense.missed == ({"w": sum(rounds)} if rounds else {})


@pytest.mark.parametrize("early", [0, 1, 2])
def test_reduce_applies_the_mean_of_all_gradients_in_order(early: int) -> None:
    (shard,) = shards(ps=1)
    (by_hand,) = shards(ps=1)
    for worker in range(3):
        push(shard, worker)
    for worker in range(early):
        shard.carry_out(Accumulate(worker))
    shard.carry_out(Reduce(tuple(range(early, 3))))
    by_hand.stage(0, 0)
    by_hand.segment.gradient(0)[:] = (gradient(0) + gradient(1) + gradient(2)) * np.float32(1 / 3)
    by_hand.carry_out(Apply(0))
    assert whole([shard]) == whole([by_hand])
    assert shard.slots["average"].tobytes() == by_hand.slots["average"].tobytes()
    assert (shard.version, shard.accumulated) == (1, 0)


@pytest.mark.parametrize("ps", [2, 3])
def test_shards_of_several_ps_hold_the_bits_of_one(ps: int) -> None:
    def train(made: list[Shard]) -> bytes:
        for shard in made:
            for worker in range(4):
                push(shard, worker)
            shard.carry_out(Accumulate(3))
            shard.carry_out(Reduce((0, 2, 1)))
            shard.carry_out(Apply(3))
        return whole(made)

    assert len([shard for shard in shards(ps) if shard.layout.size]) == ps
    assert train(shards(ps)) == train(shards(ps=1))


@pytest.mark.parametrize("ps", [2, 3])
def test_shards_that_add_up_their_squares_clip_with_the_bits_of_one(ps: int) -> None:
    def train(made: list[Shard]) -> bytes:
        for shard in made:
            for worker in range(3):
                push(shard, worker, examples=1 + worker)
            shard.carry_out(Accumulate(1))
        squares = [shard.square_of(Reduce((2, 0))) for shard in made]
        for shard in made:
            shard.carry_out(Reduce((2, 0), float(sum(squares))))
        return whole(made)

    (alone,) = shards(ps=1, clip_norm=0.5)
    for worker in range(3):
        push(alone, worker, examples=1 + worker)
    alone.carry_out(Accumulate(1))
    alone.carry_out(Reduce((2, 0)))
    assert train(shards(ps, clip_norm=0.5)) == whole([alone])
    mean = (gradient(0) + 2.0 * gradient(1) + 3.0 * gradient(2)) / 6
    clipped = mean * 0.5 / np.linalg.norm(mean)
    np.testing.assert_allclose(alone.slots["m"], 0.1 * clipped, rtol=1e-5, atol=1e-9)


def test_update_between_the_gradients_of_a_step_leaves_their_sum() -> None:
    """A push that was counted before a switch may come to a shard after the first of a step."""
    (shard,), (whole,) = shards(ps=1), shards(ps=1)
    for worker in range(3):
        push(shard, worker)
        push(whole, worker)
    shard.carry_out(Accumulate(0))
    shard.carry_out(Apply(2))
    shard.carry_out(Reduce((1,)))
    whole.carry_out(Apply(2))
    whole.carry_out(Reduce((0, 1)))
    assert shard.accumulated == 0
    assert (shard.parameters == whole.parameters).all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("rule", [LAMB(0.1), Adafactor(0.1)], ids=repr)
def test_rule_with_norms_takes_what_a_ps_holds_of_a_variable_for_a_whole_one(
    rule: LayerRule, ps: int, fused: bool
) -> None:
    """A small variable is on one ps; of a large one each has a part, with norms of its own."""
    variables = [Variable("w", (ROWS,)), Variable("b", (7,))]
    pushed = [{name: normal(v, worker) for name, v in sizes(variables)} for worker in range(2)]
    mean = {name: (pushed[0][name] + pushed[1][name]) * np.float32(0.5) for name in pushed[0]}
    for layout in place(variables, ps, partition_nbytes=4 * ROWS // ps):
        shard = Shard(layout, Update(rule, fused=fused), threads=2)
        flat = layout.flat_of({name: normal(v, 7) for name, v in sizes(variables)})
        shard.initialize(flat)
        for worker, gradient in enumerate(pushed):
            layout.gather(gradient, shard.segment.gradient(worker))
            shard.stage(worker, worker)
        shard.carry_out(Reduce((0, 1)))
        held = {cut.variable.name: cut for cut in layout.slices}
        assert len(held) == len(layout.slices)  # or a variable would lie in two places
        for cut in layout.slices:
            w, found = cut.run(flat).copy(), cut.run(shard.parameters)
            rule.update(w, cut.of(mean[cut.variable.name]), new_slots(rule, w), 0)
            assert found.tobytes() == w.tobytes()


@dataclass(frozen=True)
class Sensitive(LAMB):
    """Its steps show the last bits of the sums of squares."""

    def factor(self, squares: tuple[float, float], size: int, step: int) -> np.float32:
        return np.float32(sum(frexp(square)[0] * 2**53 % 256 for square in squares))


@pytest.mark.parametrize("rule", [Sensitive(), Muon(0.1)], ids=["Sensitive", "Muon"])
def test_copies_have_the_same_bits_where_rules_look_at_whole_variables(
    rule: LayerRule, cut_parts: CutParts
) -> None:
    cut_parts(part_size=2048)  # which begin elsewhere in the variables of each shard
    variables = [Variable(f"w{n}", (57 + n, 39)) for n in range(9)]
    names = [variable.name for variable in variables]
    update, held = Update(rule, exact=True), dict[str, set[bytes]]()

    def drawn(seed: int) -> dict[str, Any]:
        return {v.name: normal(v.size, seed).reshape(v.shape) for v in variables}

    for layout in with_copies(place(variables, 3, whole=names), 2):
        shard = Shard(layout, update, threads=1 + layout.shard)
        shard.initialize(layout.flat_of(drawn(7)))
        for worker in range(2):
            layout.gather(drawn(worker), shard.segment.gradient(worker))
            shard.stage(worker, worker)
        shard.carry_out(Reduce((0, 1)))
        for cut in layout.slices:
            held.setdefault(cut.variable.name, set()).add(cut.run(shard.parameters).tobytes())
    assert {name: len(values) for name, values in held.items()} == dict.fromkeys(names, 1)


def sizes(variables: list[Variable]) -> list[tuple[str, int]]:
    return [(variable.name, variable.size) for variable in variables]


def normal(size: int, seed: int) -> Flat:
    return np.random.default_rng(seed).standard_normal(size, np.float32)
