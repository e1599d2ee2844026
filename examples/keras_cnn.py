"""A convolutional network in Keras, on images of digits.

Needs the extras keras and torch, or keras and jax with KERAS_BACKEND=jax.

zmqtrain run examples/keras_cnn.py --workers 2
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported

import keras
from keras import layers

from zmqtrain import Job
from zmqtrain.adapters.keras import KerasModel
from zmqtrain.data import Digits


def build():
    model = keras.Sequential(
        [
            keras.Input((64,)),  # images of 8 x 8 pixels, taken as if they had 24 x 24
            *(layers.Reshape((8, 8, 1)), layers.UpSampling2D(3)),
            *(layers.Conv2D(32, 5, padding="same", activation="relu"), layers.MaxPooling2D()),
            *(layers.Conv2D(64, 5, padding="same", activation="relu"), layers.MaxPooling2D()),
            *(layers.Flatten(), layers.Dense(512, "relu"), layers.Dense(10)),
        ],
        name="cnn",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.001), loss, metrics=["accuracy"])
    return model


model = KerasModel(build)
job = Job(
    model=model,
    data=Digits(),
    optimizer=model.optimizer,
    policy="sync-replicas",
    batch_size=64,
    steps=150,
)
