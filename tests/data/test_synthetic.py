from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.data import NoisyLine
from zmqtrain.errors import ConfigError
from zmqtrain.models import Data


def test_points_lie_around_the_line() -> None:
    data = NoisyLine(slope=-3.0, intercept=0.5, noise=0.1, examples=2000)
    train, evaluation = data.load(None)
    assert isinstance(data, Data)
    assert (len(train), len(evaluation)) == (2000, 400)
    for dataset in (train, evaluation):
        x, y = dataset.arrays
        assert (x.dtype, x.shape, y.dtype, y.shape) == (
            np.float32,
            (len(dataset), 1),
            np.float32,
            (len(dataset), 1),
        )
        slope, intercept = np.polyfit(x[:, 0], y[:, 0], 1)
        assert slope == pytest.approx(-3.0, abs=0.05)
        assert intercept == pytest.approx(0.5, abs=0.05)
        assert (y - (-3 * x + 0.5)).std() == pytest.approx(0.1, rel=0.1)
        assert -1 <= x.min() < -0.9 < 0.9 < x.max() < 1


def test_same_seed_gives_the_same_points_and_evaluation_has_others() -> None:
    train, evaluation = NoisyLine(seed=1).load(None)
    np.testing.assert_array_equal(train.arrays[0], NoisyLine(seed=1).load(None)[0].arrays[0])
    assert not np.array_equal(train.arrays[0], NoisyLine(seed=2).load(None)[0].arrays[0])
    assert not np.isin(evaluation.arrays[0], train.arrays[0]).any()


def test_line_of_one_example_has_one_for_evaluation() -> None:
    assert [len(part) for part in NoisyLine(examples=1).load(None)] == [1, 1]


@pytest.mark.parametrize("options", [{"examples": 0}, {"noise": -0.1}, {"seed": -1}])
def test_line_that_cannot_be_is_refused(options: dict[str, float]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        NoisyLine(**options)  # type: ignore[arg-type]
