"""How two jobs differ, in words."""

from __future__ import annotations

import pytest

from zmqtrain.fingerprint import changes_since, fingerprint_difference
from zmqtrain.optim import SGD, Adam
from zmqtrain.optim.pipeline import Update
from zmqtrain.optim.schedules import Cosine

BEFORE, OTHER_RULE, SCHEDULED = map(Update, (Adam(0.001), SGD(0.1), Adam(Cosine(0.1, 9))))


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (Update(Adam(0.002)), "learning_rate=0.001 then, learning_rate=0.002 now"),
        (
            Update(Adam(0.002), l2=0.1),
            "learning_rate=0.001, l2=0.0 then, learning_rate=0.002, l2=0.1 now",
        ),
        (OTHER_RULE, f"{BEFORE} then, {OTHER_RULE} now"),
        (SCHEDULED, f"{BEFORE} then, {SCHEDULED} now"),
    ],
)
def test_of_an_optimizer_that_has_changed_only_other_values_are_told(
    now: Update, told: str
) -> None:
    then = {"optimizer": repr(BEFORE), "seed": "0"}
    assert changes_since(then, then | {"optimizer": repr(now)}) == f"optimizer: {told}"


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ({}, "model: nothing there, MLP(64, 10) here"),
        ({"model": "MLP(64, 9)"}, "model: MLP(64, 9) there, MLP(64, 10) here"),
    ],
)
def test_what_has_no_names_is_told_as_a_whole(theirs: dict[str, str], told: str) -> None:
    assert fingerprint_difference(theirs, {"model": "MLP(64, 10)"}) == told
