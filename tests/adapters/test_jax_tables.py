"""Tables of a JAX model: the same loss and gradient as those of dense parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax import numpy as jnp  # noqa: E402

import zmqtrain  # noqa: E402
from tests.rows import TableStep  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.jax import JaxModel  # noqa: E402
from zmqtrain.adapters.jax_tables import TableOf  # noqa: E402
from zmqtrain.data import Arrays  # noqa: E402
from zmqtrain.errors import ConfigError, DataError  # noqa: E402
from zmqtrain.models.rows import TableReader  # noqa: E402
from zmqtrain.models.tables import Given, Table  # noqa: E402
from zmqtrain.optim import Adagrad  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.integers(0, 30, (24, 6))
Y = RNG.normal(size=24).astype(np.float32)
USERS = RNG.normal(size=(30, 4)).astype(np.float32)
ITEMS = RNG.normal(size=(40, 4)).astype(np.float32)
TABLES = {
    "user": TableOf(4, lambda batch: batch[0][:, 0], 30, Given(USERS)),
    "item": TableOf(4, lambda batch: (batch[0][:, 1:3], [batch[0][:, 3]]), 40, Given(ITEMS)),
}


def init(key: Any) -> Any:
    return {"head": jnp.full((4, 1), 0.5)}


def init_densely(key: Any) -> Any:
    return {**init(key), "user": jnp.asarray(USERS), "item": jnp.asarray(ITEMS)}


def score(parameters: Any, x: Any) -> Any:
    pair, [third] = parameters["item"]
    return ((parameters["user"] + pair.sum(1) * third) @ parameters["head"])[:, 0]


def loss(parameters: Any, batch: Any, key: Any) -> Any:
    return ((score(parameters, batch[0]) - batch[1]) ** 2).mean()


def rows_in(parameters: Any, x: Any) -> Any:
    items = parameters["item"]
    return parameters | {
        "user": parameters["user"][x[:, 0]],
        "item": (items[x[:, 1:3]], [items[x[:, 3]]]),
    }


def score_densely(parameters: Any, x: Any) -> Any:
    return score(rows_in(parameters, x), x)


def loss_densely(parameters: Any, batch: Any, key: Any) -> Any:
    return loss(rows_in(parameters, batch[0]), batch, key)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_tables_have_the_loss_and_gradient_of_dense_parameters(dtype: Any) -> None:
    tables = TableStep(JaxModel(init, loss, predict=score, tables=TABLES, dtype=dtype))
    plain = TableStep(JaxModel(init_densely, loss_densely, predict=score_densely, dtype=dtype))
    for batch in ((X, Y), (X[:9], Y[:9])):
        assert tables(batch) == plain(batch)
        for name, rows in tables.rows().items():
            assert {*rows} == {*np.flatnonzero(plain.out[name].any(1)).tolist()}
            # Rows are cast where they are gathered, so that bfloat16 adds up duplicates in float32.
            tolerance = 0 if dtype is None else 0.02
            for id_, row in rows.items():
                np.testing.assert_allclose(row, plain.out[name][id_], tolerance, tolerance)
        np.testing.assert_array_equal(tables.out["head"], plain.out["head"])
        assert tables.evaluate(batch) == plain.evaluate(batch)
        outputs = (model.model.predict(model.values, batch) for model in (tables, plain))
        np.testing.assert_array_equal(*outputs)
    assert all(len(request) == 2 for request in tables.source.requests)


def test_loop_of_the_users_own_has_the_same_gradient() -> None:
    step = TableStep(JaxModel(init, loss, tables=TABLES))
    expected = step((X, Y))
    rows, head = step.rows(), step.out["head"].copy()
    step.begin()
    parameters, *rest = step.model.begin(step.values, (X, Y), step.out)
    found, gradients = jax.value_and_grad(loss)(parameters, *rest)
    assert step.model.finish(found, gradients) == pytest.approx(expected)
    np.testing.assert_allclose(step.out["head"], head, 1e-5)
    for name, of_table in step.rows().items():
        for id_, row in of_table.items():
            np.testing.assert_allclose(row, rows[name][id_], 1e-5, 1e-7)


def test_ids_of_64_bits_in_an_array_of_their_own() -> None:
    ids = {"word": TableOf(4, lambda batch: batch["word"])}
    step = TableStep(
        JaxModel(
            init,
            lambda parameters, batch, key: (
                (parameters["word"] @ parameters["head"]).mean() + 0.0 * batch["word"].sum()
            ),
            tables=ids,
        )
    )
    assert step.model.tables(0) == {"word": Table(dim=4)}
    words = np.array([2**62, -(2**63), 5, 5])
    step({"word": words, "y": Y[:4]})
    assert {*step.rows()["word"]} == {2**62, -(2**63), 5}


def test_number_of_unique_rows_compiles_few_steps() -> None:
    compiled = []

    def noted(parameters: Any, batch: Any, key: Any) -> Any:
        compiled.append(batch[0].shape)
        return loss(parameters, batch, key)

    step = TableStep(JaxModel(init, noted, tables=TABLES))
    for count in range(1, 30):
        step((X % count, Y))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"init": lambda key: [jnp.ones(4)]}, ConfigError, "init returned a list; expected a dict"),
        (
            {"init": lambda key: init(key) | {"user": [jnp.ones(4)]}},
            ConfigError,
            "a dict of head, user; expected a dict of parameters without user, item",
        ),
        ({"tables": {"user": TableOf(4, lambda b: b[1])}}, DataError, "'user' are float32"),
        ({"tables": {"user": TableOf(4, lambda b: b[0], 9)}}, DataError, "has 9 rows, but"),
    ],
)
def test_what_cannot_be_looked_up_is_refused(options: Any, kind: Any, text: str) -> None:
    step = TableStep(JaxModel(**{"init": init, "loss": loss, "tables": TABLES} | options))
    with pytest.raises(kind, match=text):
        step((X, Y))


def test_training_has_the_bits_of_dense_parameters(one_thread: None) -> None:
    options: Any = {"data": Arrays((X, Y), (X, Y)), "optimizer": Adagrad(0.1), "batch_size": 8}
    made = [JaxModel(init, loss, tables=TABLES), JaxModel(init_densely, loss_densely)]
    runs = [zmqtrain.run(Job(model=one, steps=9, **options)) for one in made]
    assert runs[0].measures == runs[1].measures
    for name, value in runs[1].parameters.items():
        found = runs[0].parameters[name]
        found = found.whole() if isinstance(found, TableReader) else found
        np.testing.assert_array_equal(found, value)


def test_weights_without_rows_are_refused_by_name() -> None:
    model = JaxModel(init, loss, predict=score, tables=TABLES)
    with pytest.raises(ConfigError, match="no rows of the table 'user'"):
        model.predict(model.parameters(0), (X, Y))
