"""MobileNetV2 of keras.applications, on digits of 32 x 32 pixels.

The running statistics of batch normalisation are state of the job, so an evaluation uses those of
all workers. Needs the extras keras and torch, or keras and jax with KERAS_BACKEND=jax.

zmqtrain run examples/keras_mobilenet.py --workers 2
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported

import keras

from zmqtrain import Job
from zmqtrain.adapters.keras import KerasModel
from zmqtrain.data import Digits


def build():
    """``inputs``: digits of 8 x 8 pixels, float32 (n, 64)."""
    inputs = keras.Input((64,))
    x = keras.layers.Reshape((8, 8, 1))(inputs)
    x = keras.layers.UpSampling2D(4)(keras.layers.Concatenate()([x, x, x]))
    net = keras.applications.MobileNetV2(
        input_tensor=x, weights=None, classes=10, classifier_activation=None
    )
    for layer in net.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9  # with Keras's 0.999 the statistics need thousands of steps
    model = keras.Model(inputs, net.output, name="mobilenet")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.002), loss, metrics=["accuracy"])
    return model


model = KerasModel(build)
job = Job(
    model=model,
    data=Digits(),
    optimizer=model.optimizer,
    policy="sync-replicas",
    batch_size=32,
    steps=120,
)
