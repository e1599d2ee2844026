"""Embeddings of a Keras model that are tables, on the backend of this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")  # make test-frameworks runs both
keras = pytest.importorskip("keras")

import zmqtrain  # noqa: E402
from tests.rows import TableStep  # noqa: E402
from zmqtrain.adapters.keras import BACKEND, KerasModel, load_weights  # noqa: E402
from zmqtrain.errors import ConfigError, DataError  # noqa: E402
from zmqtrain.models.tables import Table  # noqa: E402

layers = keras.layers

RNG = np.random.default_rng(0)
X = RNG.integers(1, 30, (24, 3)).astype(np.int32)
Y = RNG.normal(size=(24, 1)).astype(np.float32)
USERS, ITEMS = "user/embeddings", "item/embeddings"


def net(**options: Any) -> Any:
    """Return a model of two embeddings, one of which is called twice."""
    keras.utils.set_random_seed(1)
    user, item = keras.Input((), dtype="int32", name="a"), keras.Input((2,), name="b")
    items = layers.Embedding(40, 4, name="item", mask_zero=True)
    users = layers.Embedding(30, 4, name="user", **options)
    pair = layers.GlobalAveragePooling1D()(items(item))
    later = layers.GlobalAveragePooling1D()(items(item[:, :1] + 1))
    outputs = layers.Dense(1)(users(user) * pair + later)
    model = keras.Model([user, item], outputs)
    model.compile("sgd", "mse")
    return model


BATCH = (X[:, 0], X[:, 1:].astype(np.float32), Y)


def model(*patterns: str, build: Any = net) -> KerasModel:
    made = KerasModel(build)
    made.make_tables(patterns)
    return made


def test_tables_have_the_loss_and_gradient_of_dense_embeddings(one_thread: None) -> None:
    tables, plain = TableStep(model("user/*", "item*")), TableStep(model())
    assert {*tables.model.tables(0)} == {USERS, ITEMS}
    for batch in (BATCH, tuple(part[:7] for part in BATCH), BATCH):
        assert tables(batch) == pytest.approx(plain(batch), rel=1e-6)
        for name, rows in tables.rows().items():
            assert {*np.flatnonzero(plain.out[name].any(1)).tolist()} <= {*rows}
            for id_, row in rows.items():
                np.testing.assert_allclose(row, plain.out[name][id_], 1e-5, 1e-7)
        assert tables.evaluate(batch) == pytest.approx(plain.evaluate(batch), rel=1e-6)
        for step in (tables, plain):
            step.begin()
        outputs = (step.model.predict(step.values, batch[:2]) for step in (tables, plain))
        np.testing.assert_allclose(*outputs, 1e-5)
    if BACKEND == "jax":
        assert all(len(request) == 2 for request in tables.source.requests)


def test_trained_rows_are_in_a_model_of_keras_afterwards(tmp_path: Path) -> None:
    inputs = BATCH[:2]
    options: Any = {"batch_size": 8, "tables": {"*/embeddings": Table()}}
    trainer = zmqtrain.Trainer(KerasModel(net), **options)
    trainer.fit(BATCH, epochs=3, verbose=False)
    plain = zmqtrain.Trainer(KerasModel(net), batch_size=8)
    plain.fit(BATCH, epochs=3, verbose=False)
    expected = plain.predict(inputs)
    np.testing.assert_allclose(trainer.predict(inputs), expected, 1e-4, 1e-6)
    whole = trainer.model.with_weights(trainer.weights)
    np.testing.assert_allclose(whole.predict(list(inputs), verbose=0), expected, 1e-4, 1e-6)
    other = net()
    load_weights(other, trainer.weights)
    users = other.get_layer("user").get_weights()[0]
    np.testing.assert_allclose(users, plain.weights[USERS], 1e-4, 1e-6)
    trainer.model.save(tmp_path / "x.keras", trainer.weights)
    np.testing.assert_array_equal(
        keras.models.load_model(tmp_path / "x.keras").get_layer("user").get_weights()[0], users
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"embeddings_regularizer": "l2"}, "with an embeddings_regularizer; expected float32"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"lora_rank": 2}, "LoRA"),
    ],
)
def test_embedding_that_cannot_be_a_table_is_refused(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        model("user/*", build=lambda: net(**options)).tables(0)


def test_id_that_is_none_of_the_table_is_refused() -> None:
    step = TableStep(model("user/*"))
    with pytest.raises(DataError, match="has 30 rows, but the batch has id 31"):
        step((X[:, 0] * 0 + 31, *BATCH[1:]))


def test_rows_that_are_not_here_are_not_replaced_by_others() -> None:
    made = model("user/*")
    weights = made.parameters(0) | made.state(0)
    with pytest.raises(ConfigError, match=r"no rows of the table 'user/embeddings'"):
        made.with_weights(weights)


@pytest.mark.skipif(BACKEND != "jax", reason="on torch a model finds its ids when it runs")
def test_ids_that_are_not_known_before_the_model_runs_are_refused() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.user = layers.Embedding(30, 4, name="user")

        def call(self, x: Any) -> Any:
            return self.user(x).sum(-1)

    def build() -> Any:
        own = Own()
        own(X[:2, 0])
        own.compile("sgd", "mse")
        return own

    with pytest.raises(ConfigError, match="set KERAS_BACKEND to torch"):
        model("*embeddings", build=build).tables(0)


@pytest.mark.parametrize("id_", [1.5, 2.0**24])
def test_floats_that_may_not_be_the_ids_that_were_meant_are_refused(id_: float) -> None:
    step = TableStep(model("item*"))
    wrong = BATCH[1].copy()
    wrong[3, 1] = id_
    with pytest.raises(
        DataError, match=r"'item/embeddings' is given id .* of float32; expected an integer"
    ):
        step((BATCH[0], wrong, Y))
