"""Ids that are trained most often, from samples."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.store.hot_ids import HotIds


@pytest.mark.parametrize("kept", [4096, 64])
def test_ids_of_most_updates_are_the_hottest(kept: int) -> None:
    random, hot = np.random.default_rng(0), HotIds(kept, every_s=0)
    often = np.array([-3, 5, 2**62])
    for _ in range(100):
        hot.saw(np.unique(np.concatenate([often, random.integers(10, 10**9, 40)])))
        hot.hottest()
    first = hot.hottest()
    assert sorted(id_ for id_, _ in first[:3]) == often.tolist()
    assert [count for _, count in first[:3]] == [100, 100, 100]
    assert len(first) == 10


def test_large_updates_are_sampled() -> None:
    hot = HotIds(50, every_s=0)
    for number in range(200):
        hot.saw(np.union1d([7], np.arange(1000 * (number + 1), 1000 * (number + 1) + 400)))
        hot.hottest()
    (id_, count), *_ = hot.hottest()
    assert id_ == 7
    assert 200 / 10 < count < 200 / 5


def test_ids_are_counted_at_most_once_in_a_while() -> None:
    hot = HotIds(every_s=1e9)
    assert hot.hottest() == ()
    for id_ in (1, 2):
        hot.saw(np.array([id_]))
        assert hot.hottest() == ((1, 1),)
