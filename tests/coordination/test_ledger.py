"""The ledger by itself; test_passes.py and test_coordinator_schedules.py have its laws."""

from __future__ import annotations

from zmqtrain.coordination.events import PushArrived, Stepped
from zmqtrain.coordination.ledger import Ledger


def test_ledger_of_a_checkpoint_goes_on_with_its_open_batches() -> None:
    ledger = Ledger(next_batch=9, returned=[7, 2, 4])
    assert [ledger.lease(worker) for worker in (0, 1, 0, 1, 0)] == [2, 4, 7, 9, 10]
    ledger.leave(1)
    ledger.leave(0)
    assert [ledger.lease(2) for _ in range(6)] == [2, 4, 7, 9, 10, 11]


def test_pass_sums_only_the_measures_of_all_its_batches() -> None:
    ledger = Ledger(limit=3)
    batches = [ledger.lease(0) for _ in range(3)]
    for batch, sums in zip(batches, ({"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 8.0}), strict=False):
        ledger.arrive(PushArrived(0, 1, batch, 10, loss=0.5, sums=sums, weight=4.0))
    ledger.give_back(0)
    ledger.count(0)
    assert (ledger.pass_examples, ledger.pass_sums) == (10, {"a": 1.0, "b": 2.0})
    assert (ledger.examples, ledger.pass_weight, ledger.mean_loss) == (10, 4.0, 0.5)
    ledger.advance([0], Stepped(1, 10, 18.0, over=False, sums={"b": 16.0}, weight=12.0))
    assert (ledger.pass_sums, ledger.mean_loss) == ({"b": 18.0}, 20 / 16)
    ledger.raise_limit(9)
    assert ledger.pass_sums == {}
