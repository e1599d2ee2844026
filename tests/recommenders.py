"""A small recommender whose users and items are tables, and the same one trained densely."""

from __future__ import annotations

from typing import Any

import numpy as np

from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.models.rows import summed
from zmqtrain.models.tables import Table, Uniform, key_of
from zmqtrain.optim import Adagrad

USERS, ITEMS, DIM = 40, 25, 3
BATCH = 8

_random = np.random.default_rng(0)
_IDS = np.stack([_random.integers(0, n, 160) for n in (USERS, ITEMS)], axis=1)
_RATINGS = _random.standard_normal(160, np.float32)
DATA = Arrays((_IDS, _RATINGS), (_IDS[:50], _RATINGS[:50]))


class Recommender:
    """The product of a user's and an item's row, and a bias, is the rating; mean squared error."""

    def __init__(self, users: int | None = USERS, items: int | None = ITEMS) -> None:
        self._sizes = {"user": users, "item": items}

    def __repr__(self) -> str:
        return f"Recommender({self._sizes})"

    def tables(self, seed: int) -> dict[str, Table]:
        initial = Uniform(0.5)
        return {name: Table(dim=DIM, rows=n, initial=initial) for name, n in self._sizes.items()}

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"bias": np.zeros(1, np.float32)}

    def rows_of(self, parameters: Any, name: str, ids: Any) -> Any:
        return parameters[name].take(ids)

    def add(self, out: Any, name: str, ids: Any, rows: Any) -> None:
        out[name].add(ids, rows)

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        ids, ratings = batch
        users, items = (
            self.rows_of(parameters, name, ids[:, n]) for n, name in enumerate(("user", "item"))
        )
        error = (users * items).sum(1) + parameters["bias"] - ratings
        slope = (2 * error / np.float32(len(ids))).astype(np.float32)
        self.add(out, "user", ids[:, 0], slope[:, None] * items)
        self.add(out, "item", ids[:, 1], slope[:, None] * users)
        out["bias"][...] = slope.sum()
        return float((error**2).mean())

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        error = self.predict(parameters, batch) - batch[1]
        return {"loss": float((error**2).mean())}

    def predict(self, parameters: Any, batch: Any) -> Any:
        ids = batch[0]
        pair = [self.rows_of(parameters, name, ids[:, n]) for n, name in enumerate(self._sizes)]
        return (pair[0] * pair[1]).sum(1) + parameters["bias"]


class Only(Recommender):
    """The same without a bias: it has tables alone."""

    def parameters(self, seed: int) -> dict[str, Any]:
        return {}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        bias = {"bias": np.zeros(1, np.float32)}
        both = {name: out[name] for name in ("user", "item")} | {"bias": bias["bias"].copy()}
        return super().loss_and_gradients({**parameters, **bias}, batch, both)

    def predict(self, parameters: Any, batch: Any) -> Any:
        return super().predict({**parameters, "bias": np.float32(0)}, batch)


class Dense(Recommender):
    """The same model, whose rows are ordinary parameters with a gradient of every row."""

    def tables(self, seed: int) -> dict[str, Table]:
        return {}

    def parameters(self, seed: int) -> dict[str, Any]:
        found = {
            name: Uniform(0.5).rows(key_of(seed, name), np.arange(count or 0), DIM)
            for name, count in self._sizes.items()
        }
        return super().parameters(seed) | found

    def rows_of(self, parameters: Any, name: str, ids: Any) -> Any:
        return parameters[name][ids]

    def add(self, out: Any, name: str, ids: Any, rows: Any) -> None:
        unique, places = np.unique(ids, return_inverse=True)
        out[name][...] = 0
        out[name][unique] = summed(len(unique), places, rows)


def make_job(model: Any = None, **fields: Any) -> Job:
    defaults = {"batch_size": BATCH, "optimizer": Adagrad(0.3)}
    if "epochs" not in fields:
        defaults["steps"] = 6
    return Job(model=model or Recommender(), data=DATA, **defaults | fields)
