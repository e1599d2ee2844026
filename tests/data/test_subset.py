"""Batches that do not have the requested rows are refused in every use of a data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from zmqtrain import Job
from zmqtrain.data import ArrayDataset, Arrays, Cached, Mapped, Parallel
from zmqtrain.data.description import describe
from zmqtrain.data.subset import Subset, checked, take_seeded
from zmqtrain.errors import DataError
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD

X = np.linspace(0, 1, 40, dtype=np.float32)[:, None]
SOUND = ArrayDataset(X, 2 * X)


class Wrong(ArrayDataset):
    """A data set, one of whose arrays has the wrong number of rows."""

    def __init__(self, rows: Callable[[Any], Any], place: int = 1) -> None:
        super().__init__(X, 2 * X)
        self.rows, self.place = rows, place

    def take(self, indices: Any) -> Any:
        arrays = list(super().take(indices))
        arrays[self.place] = self.rows(arrays[self.place])
        return tuple(arrays)

    def __repr__(self) -> str:
        return "Wrong()"


def fewer(array: Any) -> Any:
    return array[:-1]


def one(array: Any) -> Any:
    return array[:1]


def more(array: Any) -> Any:
    return np.concatenate([array, array])


USES: dict[str, Callable[[Any, Path], Any]] = {
    "Mapped": lambda wrong, _: Mapped(wrong, lambda x, y: (x, y)).take(np.arange(6)),
    "Subset": lambda wrong, _: take_seeded(
        Subset(wrong, np.arange(9)), np.arange(6), 0, np.zeros(6)
    ),
    "Parallel": lambda wrong, _: Parallel(wrong, 2).take(np.arange(12)),
    "Cached": lambda wrong, _: Cached(wrong).take(np.arange(6)),
    "Cached in a directory": lambda wrong, path: Cached(wrong, path / "cache").take(np.arange(6)),
    "training": lambda wrong, _: zmqtrain.run(job(wrong)),
    "an epoch": lambda wrong, _: zmqtrain.run(job(wrong, epochs=1)),
    "an evaluation set": lambda wrong, _: zmqtrain.run(job(Arrays(SOUND, wrong))),
    "evaluating": lambda wrong, _: zmqtrain.Trainer(LinearRegression(), SGD(0.1)).evaluate(wrong),
    "workers": lambda wrong, _: zmqtrain.run(job(wrong), workers=2),
}


def job(data: Any, **fields: Any) -> Job:
    ends = {} if "epochs" in fields else {"steps": 20}
    defaults: dict[str, Any] = {"batch_size": 6} | ends
    return Job(model=LinearRegression(), data=data, optimizer=SGD(0.1), **defaults | fields)


@pytest.mark.parametrize("rows", [fewer, one, more])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_data_set_that_returns_the_wrong_rows_is_named(
    use: Callable[[Any, Path], Any], place: int, rows: Callable[[Any], Any], tmp_path: Path
) -> None:
    text = rf"^take\(\) of .*Wrong\(\).* got (\d+) indices and returned array {place} .* shape"
    with pytest.raises(DataError, match=text):
        use(Wrong(rows, place), tmp_path)


def test_description_of_wrong_rows_is_refused() -> None:
    with pytest.raises(DataError, match=r"got 1 indices .* of the shape \(2, 1\)"):
        describe(Wrong(more))


@pytest.mark.parametrize("batch", [None, (), [X], (3.0,)])
def test_value_that_is_no_batch_is_refused(batch: Any) -> None:
    with pytest.raises(DataError, match="expected a tuple of arrays with a row for each example"):
        checked(batch, 1, "data")
