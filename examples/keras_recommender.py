"""Two recommenders in Keras. Most of their parameters are rows of tables.

The models are those of torch_recommender.py: `job` has two towers, one for users and one for films;
`dlrm` has the shape of DLRM. The job names the embeddings that are tables, of which only the rows
of a batch are read, sent and updated. Needs the extras keras and torch, or keras and jax with
KERAS_BACKEND=jax.

zmqtrain run examples/keras_recommender.py --workers 2
zmqtrain run examples/keras_recommender.py --data DIR --workers 2     MovieLens-100k: movielens.py
zmqtrain run examples/keras_recommender.py:dlrm --workers 2
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported

import keras
from clicks import CRITEO, Clicks
from keras import layers, ops
from movielens import MovieLens

from zmqtrain import Job
from zmqtrain.adapters.keras import KerasModel
from zmqtrain.models.tables import Table
from zmqtrain.optim import RowwiseAdagrad

DIM = 16
USERS, ITEMS = 5000, 2000  # ids are below


def compiled(inputs, logits, name):
    model = keras.Model(inputs, logits, name=name)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    accuracy = keras.metrics.BinaryAccuracy(name="accuracy", threshold=0)
    auc = keras.metrics.AUC(1000, from_logits=True, name="auc")
    model.compile(keras.optimizers.Adam(0.002), loss, metrics=[accuracy, auc])
    return model


def tower(ids, rows, name):
    """Return vectors of DIM numbers and a bias."""
    x = layers.Embedding(rows, DIM, name=name)(ids)
    x = layers.Dense(32, "relu")(x)
    return layers.Dense(DIM)(x), layers.Dense(1)(x)


def two_towers():
    ids = keras.Input((2,), dtype="int64")
    user, user_bias = tower(ids[:, 0], USERS, "user")
    item, item_bias = tower(ids[:, 1], ITEMS, "item")
    product = layers.Dot(axes=1)([user, item])
    return compiled(ids, layers.Add()([product, user_bias, item_bias]), "two_towers")


def dlrm_net():
    numbers, ids = keras.Input((13,)), keras.Input((len(CRITEO),), dtype="int64")
    x = layers.Dense(DIM)(layers.Dense(64, "relu")(numbers))
    rows = [
        layers.Embedding(count, DIM, name=f"table{at}")(ids[:, at])
        for at, count in enumerate(CRITEO)
    ]
    vectors = ops.stack([x, *rows], axis=1)
    products = layers.Flatten()(layers.Dot(axes=2)([vectors, vectors]))
    hidden = layers.Dense(64, "relu")(layers.Concatenate()([x, products]))
    return compiled([numbers, ids], layers.Dense(1)(hidden), "dlrm")


def job_of(build, data, rate, **fields):
    model = KerasModel(build)
    tables = {"*/embeddings": Table(optimizer=RowwiseAdagrad(rate))}
    return Job(model=model, data=data, optimizer=model.optimizer, tables=tables, **fields)


job = job_of(two_towers, MovieLens(), 0.1, batch_size=256, steps=1600)
dlrm = job_of(dlrm_net, Clicks(), 0.05, batch_size=512, steps=400)
